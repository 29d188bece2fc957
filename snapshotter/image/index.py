"""The index of a layer: all that must be local before the layer can be mounted and read.

Where each chunk comes from and its digest, where inflating can begin, and the EROFS metadata
image. The checkpoints' windows lie in a second file, which a mount does not need. An index is
immutable; whoever opens one may trust its structure, while what it promises is only as good as
who made it. It knows no registry and no cache.
"""

from __future__ import annotations

import bisect
import mmap
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import zstandard
from blake3 import blake3

from snapshotter.content import Digest, Extent
from snapshotter.errors import (
    EmberError,
    InvalidArgumentError,
    NotFoundError,
    RefusedError,
)
from snapshotter.image import index_layout as layout
from snapshotter.image.index_tables import WINDOW_BYTES, check_tables
from snapshotter.image.stream import PointKind, RestartPoint
from snapshotter.image.windows import (
    WINDOWS_SUFFIX,
    WindowFile,
    WindowSource,
    opened,
    unreadable,
)

INDEX_SUFFIX = ".idx"
RANDOM_ACCESS_BYTES = 8 * 1024 * 1024
"""A layer counts as readable at random if no more than this lies between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where decoding can begin; offsets and bits as in RestartPoint.

    Its window is ``window_bytes`` long, stored in the windows file as ``window_stored_bytes`` at
    ``window_offset``, and known by ``window_digest`` (blake3 of the stored form, 16 bytes).
    """

    number: int
    in_offset: int
    out_offset: int
    kind: PointKind
    bits: int
    window_offset: int
    window_stored_bytes: int
    window_bytes: int
    window_digest: bytes


class LayerIndex:
    """One layer's index over its file's bytes. Safe to share between threads.

    ``blob_bytes`` is the compressed, ``view_bytes`` the plain length; ``entry_count`` the tar's
    entries; ``longest_run_bytes`` the most plain bytes between two places where decoding can
    begin; ``needs_chain`` says that the metadata must be adapted to the layers below.
    """

    def __init__(
        self, data: memoryview, windows: WindowSource | None, *, where: str, verify: bool = True
    ) -> None:
        """Read an index from ``data``; RefusedError names ``where`` and the fault.

        ``windows`` may lack any of them (None: there is no place for them).
        ``verify`` reads all of it (about 1 ms for a layer of 1 GB); without, only the header is
        read, which is right only for a file that was verified before in this boot.
        """
        header = layout.unpack_header(data, where)
        if len(data) != header.file_bytes:
            raise RefusedError(
                f"{where} is {len(data)} bytes long and should be {header.file_bytes}: it is torn; "
                "remove it to index the layer again"
            )
        self.where = where
        self.layer = header.layer
        self.diff_id = header.diff_id
        self.compression = header.compression
        self.blob_bytes = header.blob_bytes
        self.view_bytes = header.view_bytes
        self.chunk_bytes = header.chunk_bytes
        self.chunk_count = header.chunk_count
        self.checkpoint_count = header.checkpoint_count
        self.entry_count = header.entry_count
        self.longest_run_bytes = header.longest_run_bytes
        self.windows_bytes = header.windows_bytes
        self.needs_chain = header.needs_chain
        self._data = data
        self._windows = windows
        self._header = header
        if verify:
            self._verify()

    @classmethod
    def open(cls, path: Path, *, layer: Digest | None = None, verify: bool = True) -> LayerIndex:
        """Map the index at ``path``; its windows are expected beside it.

        Raises NotFoundError if there is none, RefusedError if it is torn, of another version, not
        of ``layer`` or no file that can be read, UnavailableError while the node lacks something.
        """
        try:
            with open(path, "rb", opener=opened) as file:
                data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NotFoundError(f"there is no index {path}") from None
        except ValueError:
            data = b""  # an empty file cannot be mapped
        except OSError as error:
            raise unreadable(path, error) from None
        windows = WindowFile(path.with_suffix(WINDOWS_SUFFIX))
        index = cls(memoryview(data), windows, where=str(path), verify=verify)
        if layer is not None and index.layer != layer:
            raise RefusedError(f"{path} is the index of {index.layer}, not of {layer}")
        return index

    @property
    def erofs(self) -> memoryview:
        """The EROFS metadata image; its data device is the view."""
        return self._data[self._header.erofs_offset :]

    @property
    def data(self) -> memoryview:
        """The whole index file, as it would be pushed as an artifact."""
        return self._data

    @property
    def random_access(self) -> bool:
        """Whether any chunk can be had without decoding much of the layer."""
        return self.longest_run_bytes <= RANDOM_ACCESS_BYTES

    def chunk_extent(self, number: int) -> Extent:
        """The plain bytes of a chunk; the view's last may be shorter than ``chunk_bytes``."""
        self._check_chunk(number)
        offset = number * self.chunk_bytes
        return Extent(offset, min(self.chunk_bytes, self.view_bytes - offset))

    def chunk_digest(self, number: int) -> bytes:
        """The blake3 digest (32 bytes) of a chunk's plain bytes."""
        self._check_chunk(number)
        offset = layout.HEADER_BYTES + number * layout.DIGEST_BYTES
        return bytes(self._data[offset : offset + layout.DIGEST_BYTES])

    @property
    def chunk_digests(self) -> memoryview:
        """The digests of all chunks, one after the other."""
        return self._data[layout.HEADER_BYTES : self._header.ends_offset]

    def chunk_input_end(self, number: int) -> int:
        """The compressed offset by which a chunk's last byte can be produced."""
        self._check_chunk(number)
        offset = self._header.ends_offset + number * layout.END_BYTES
        return int.from_bytes(self._data[offset : offset + layout.END_BYTES], "little")

    def checkpoint(self, number: int) -> Checkpoint:
        """Checkpoint ``number``, in the order of the blob; plain layers have none."""
        if not 0 <= number < self.checkpoint_count:
            raise InvalidArgumentError(
                f"checkpoint {number} of {self.layer}, which has {self.checkpoint_count}"
            )
        offset = self._header.checkpoints_offset + number * layout.CHECKPOINT_BYTES
        in_offset, out_offset, window_offset, stored, window_bytes, bits, kind, digest = (
            layout.CHECKPOINT.unpack_from(self._data, offset)
        )
        return Checkpoint(
            number,
            in_offset,
            out_offset,
            PointKind(kind),
            bits,
            window_offset,
            stored,
            window_bytes,
            digest,
        )

    def nearest_checkpoint(self, plain_offset: int) -> Checkpoint:
        """The last checkpoint from which the byte at ``plain_offset`` comes out."""
        return self.checkpoint(bisect.bisect_right(self._out_offsets, plain_offset) - 1)

    @cached_property
    def _out_offsets(self) -> array[int]:
        begin = self._header.checkpoints_offset
        end = begin + self.checkpoint_count * layout.CHECKPOINT_BYTES
        return array("Q", (row[1] for row in layout.CHECKPOINT.iter_unpack(self._data[begin:end])))

    def restart_point(self, checkpoint: Checkpoint, stored: bytes | None = None) -> RestartPoint:
        """The checkpoint with its window: ``stored``, or what the windows file has.

        Raises NotFoundError if there is no such file, RefusedError if what is given or found is
        not this window.
        """
        window = b""
        if checkpoint.window_stored_bytes:
            if stored is None:
                stored = self._read_window(checkpoint)
            window = self._unpack_window(checkpoint, stored)
        return RestartPoint(
            checkpoint.in_offset, checkpoint.out_offset, checkpoint.kind, checkpoint.bits, window
        )

    def local_window(self, checkpoint: Checkpoint) -> bytes | None:
        """The checkpoint's window as it is stored, b"" if it needs none, None if it is not here."""
        if not checkpoint.window_stored_bytes:
            return b""
        try:
            stored = self._read_window(checkpoint)
        except EmberError:
            return None
        return stored if self.is_window(checkpoint, stored) else None

    def is_window(self, checkpoint: Checkpoint, stored: bytes) -> bool:
        """Whether these bytes, wherever they came from, are the checkpoint's stored window."""
        digest = blake3(stored).digest(layout.WINDOW_DIGEST_BYTES)
        return len(stored) == checkpoint.window_stored_bytes and digest == checkpoint.window_digest

    def keep_window(self, checkpoint: Checkpoint, stored: bytes) -> None:
        """Put a window into the windows file. Raises NoSpaceError or UnavailableError."""
        if self._windows is not None:
            self._windows.keep(checkpoint.window_offset, stored)

    def _read_window(self, checkpoint: Checkpoint) -> bytes:
        if self._windows is None:
            raise NotFoundError(f"{self.where} has no windows")
        return self._windows.read(checkpoint.window_offset, checkpoint.window_stored_bytes)

    def _unpack_window(self, checkpoint: Checkpoint, stored: bytes) -> bytes:
        if self.is_window(checkpoint, stored):
            window = _unpacked(stored, checkpoint.window_bytes)
            if window is not None:
                return window
        raise RefusedError(
            f"the window of checkpoint {checkpoint.number} of {self.where} is torn or of another "
            "index; remove the index to have the layer indexed again"
        )

    def _check_chunk(self, number: int) -> None:
        if not 0 <= number < self.chunk_count:
            raise InvalidArgumentError(
                f"chunk {number} of {self.layer}, which has {self.chunk_count} chunks"
            )

    def _refuse(self, fault: str) -> RefusedError:
        return RefusedError(f"{self.where}: {fault}; remove it to have the layer indexed again")

    def _verify(self) -> None:
        body = self._data[layout.HEADER_BYTES :]
        if blake3(body).digest() != self._header.body_digest:
            raise self._refuse("its checksum is wrong")
        check_tables(self._data, self._header, self._refuse)


def _unpacked(stored: bytes, length: int) -> bytes | None:
    """The window in one whole zstd frame, None if that does not hold ``length`` bytes.

    Nobody has to have made the frame honestly: what its header promises is not believed, and no
    more is unpacked than a window can be.
    """
    try:
        if zstandard.frame_content_size(stored) != length:
            return None
        frame = zstandard.ZstdDecompressor(max_window_size=4 * WINDOW_BYTES)
        window = frame.decompress(stored, max_output_size=WINDOW_BYTES, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    return window if len(window) == length else None
