"""Writing an index: windows first, the index last, each to a temporary name, synced, renamed.

A process killed at any point leaves either no index or a whole one, and at worst temporary files
that ``remove_leftovers`` takes away at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import zstandard
from blake3 import blake3

from ioengine.directories import sync_directory
from snapshotter.content import Compression, Digest
from snapshotter.errors import EmberError, NoSpaceError, UnavailableError
from snapshotter.image import index_layout as layout
from snapshotter.image.index import INDEX_SUFFIX
from snapshotter.image.stream import RestartPoint

_TEMPORARY = ".tmp-"
_WINDOW_LEVEL = 3


@dataclass(slots=True)
class IndexDraft:
    """The content of an index. ``chunk_digests``: 32 bytes each, in order; ``chunk_ends``:
    compressed offsets; ``checkpoints``: packed by WindowsWriter.add; sizes in bytes."""

    layer: Digest
    diff_id: Digest
    compression: Compression
    blob_bytes: int
    view_bytes: int
    chunk_bytes: int
    chunk_digests: bytes | bytearray
    chunk_ends: list[int]
    erofs: bytes | memoryview
    needs_chain: bool
    entry_count: int
    longest_run_bytes: int
    checkpoints: list[bytes] = field(default_factory=list)
    windows_bytes: int = 0

    def pack(self) -> bytes:
        """The index file's bytes."""
        ends = b"".join(end.to_bytes(layout.END_BYTES, "little") for end in self.chunk_ends)
        tables = bytes(self.chunk_digests) + ends + b"".join(self.checkpoints)
        padding = -(layout.HEADER_BYTES + len(tables)) % layout.EROFS_ALIGNMENT
        body = b"".join((tables, b"\0" * padding, self.erofs))
        header = layout.Header(
            layer=self.layer,
            diff_id=self.diff_id,
            compression=self.compression,
            blob_bytes=self.blob_bytes,
            view_bytes=self.view_bytes,
            chunk_bytes=self.chunk_bytes,
            checkpoint_count=len(self.checkpoints),
            erofs_bytes=len(self.erofs),
            entry_count=self.entry_count,
            longest_run_bytes=self.longest_run_bytes,
            windows_bytes=self.windows_bytes,
            needs_chain=self.needs_chain,
            body_digest=blake3(body).digest(),
        )
        return header.pack() + body


class WindowsWriter:
    """Collects checkpoints; their windows go to a temporary file as they come."""

    def __init__(self, path: Path) -> None:
        """``path`` is the windows file's final name; its directory must exist."""
        self._path = path
        self._temporary = temporary_name(path)
        self._file: BinaryIO | None = None
        self._compressor = zstandard.ZstdCompressor(level=_WINDOW_LEVEL)
        self.packed: list[bytes] = []
        self.windows_bytes = 0

    def add(self, point: RestartPoint) -> None:
        """Append a checkpoint. Raises NoSpaceError if its window cannot be written."""
        stored = self._compressor.compress(point.window) if point.window else b""
        self.packed.append(
            layout.CHECKPOINT.pack(
                point.in_offset,
                point.out_offset,
                self.windows_bytes if stored else 0,
                len(stored),
                len(point.window),
                point.bits,
                point.kind,
                blake3(stored).digest(layout.WINDOW_DIGEST_BYTES),
            )
        )
        if stored:
            with Writing(self._temporary):
                if self._file is None:
                    self._file = open_private(self._temporary)
                self._file.write(stored)
            self.windows_bytes += len(stored)

    def drop_last(self) -> None:
        """Forget the last checkpoint; its window stays behind in the file as unused bytes."""
        self.packed.pop()

    def publish(self) -> None:
        """Sync the windows and give them their name; without any, remove an older file."""
        with Writing(self._path):
            if self._file is None:
                self._path.unlink(missing_ok=True)
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.rename(self._path)

    def discard(self) -> None:
        """Remove the temporary file, if there still is one."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what it still had to write is given up
                self._file.close()
            self._temporary.unlink(missing_ok=True)


def index_path(directory: Path, layer: Digest) -> Path:
    """The name of a layer's index in ``directory``."""
    return directory / f"{layer.hex}{INDEX_SUFFIX}"


def write_index(path: Path, draft: IndexDraft, windows: WindowsWriter | None = None) -> None:
    """Write ``draft`` to ``path`` and its windows beside it, durably.

    An older index of that name disappears before its windows are replaced, so an index never
    stands beside windows that are not its own. Raises NoSpaceError or UnavailableError.
    """
    if windows is not None:
        draft.checkpoints, draft.windows_bytes = windows.packed, windows.windows_bytes
    temporary = temporary_name(path)
    try:
        with Writing(path):
            _write_synced(temporary, draft.pack())
            path.unlink(missing_ok=True)
            if windows is not None:
                sync_directory(path.parent)
                windows.publish()
            temporary.rename(path)
            sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_index(path: Path, data: bytes | memoryview) -> None:
    """Have the index file at ``path`` hold ``data``, durably; errors as write_index()."""
    temporary = temporary_name(path)
    try:
        with Writing(path):
            _write_synced(temporary, data)
            temporary.replace(path)
            sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes | memoryview) -> None:
    with open_private(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(directory: Path) -> int:
    """Remove what killed writers left in ``directory``: the number of files. For a start only."""
    found = [path for path in directory.iterdir() if _TEMPORARY in path.name]
    leftovers = [path for path in found if path.is_symlink() or not path.is_dir()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def open_private(path: Path) -> BinaryIO:
    """Create ``path`` for writing, readable by its owner only."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
    )


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that nobody else writes, and that `remove_leftovers` knows."""
    return path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")


class Writing:
    """Turns an OSError of the block into an error that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, OSError) or isinstance(error, EmberError):
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"no space for {self._path}: free some on its file system, or move the cache"
            ) from error
        raise UnavailableError(f"cannot write {self._path}: {error.strerror}") from error
