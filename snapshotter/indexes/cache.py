"""Indexes kept by a builder between builds, by layer digest: a directory of ``.idx`` and ``.win``.

Several builders of one machine share it: a layer is indexed under its lock, so the second builder
finds what the first has made. Whatever lies here is checked when it is opened; what is torn or of
an older version is made anew. The oldest go when it becomes too large.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import ConfigError, NotFoundError, RefusedError
from snapshotter.image.index import INDEX_SUFFIX, LayerIndex
from snapshotter.image.index_writer import index_path
from snapshotter.image.windows import WINDOWS_SUFFIX

LIMIT_BYTES = 4 * 1024**3
_POLL_S = 0.1
_LOCK_NAME = "lock"
_TEMPORARY = ".tmp-"
_NODES_DATABASE = "ember.db"


def default_directory(environment: dict[str, str]) -> Path:
    """``$XDG_CACHE_HOME/ember/index`` (XDG base directories), else below ``~/.cache``."""
    home = environment.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path(environment.get("HOME", "/root")) / ".cache"
    return base / "ember" / "index"


def refuse_a_nodes(directory: Path, option: str) -> None:
    """ConfigError for the directory in which a daemon keeps its indexes: what is put there without
    a note whose it is counts as built by that node, whoever made it."""
    place = directory.resolve()
    if place.name == "index" and (place.parent / _NODES_DATABASE).exists():
        raise ConfigError(
            f"{option} {directory}: a node keeps its own indexes there, and looks for those of"
            " others itself; name another directory"
        )


class IndexCache:
    """The directory, for one builder."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Make the directory if need be; ConfigError if it can't be used."""
        self.directory = directory
        self._clock = clock
        refuse_a_nodes(directory, "--cache")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = directory.stat()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(directory / _LOCK_NAME, flags, 0o600))
        except OSError as error:
            raise ConfigError(
                f"index cache {directory}: {error.strerror}; name another with --cache"
            ) from None
        if facts.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"index cache {directory} belongs to user {facts.st_uid}, neither root nor you; "
                "name another with --cache"
            )
        if facts.st_mode & 0o022:
            raise ConfigError(
                f"index cache {directory}: others may write there, and an index decides what an "
                "image means; name another with --cache, or chmod go-w it"
            )

    def find(self, layer: Digest, diff_id: Digest | None = None) -> LayerIndex | None:
        """The whole and sound index of ``layer`` with its windows; None if there is none."""
        path = index_path(self.directory, layer)
        try:
            index = LayerIndex.open(path, layer=layer)
            check_windows(index, path.with_suffix(WINDOWS_SUFFIX))
        except (NotFoundError, RefusedError):
            return None
        if diff_id is not None and index.diff_id != diff_id:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return index

    def windows_path(self, layer: Digest) -> Path:
        """Where the windows of ``layer`` are, if it has any."""
        return index_path(self.directory, layer).with_suffix(WINDOWS_SUFFIX)

    @asynccontextmanager
    async def alone(self, layer: Digest) -> AsyncGenerator[None, None]:
        """Only one builder of this machine at a time is in here for ``layer``.

        What a killed one left of it is removed.
        """
        place = int(layer.hex[:15], 16)
        # A descriptor of its own: the lock is the open file's, and two tasks of a builder differ.
        descriptor = os.open(self.directory / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        try:
            while not _locked(descriptor, place):
                await self._clock.sleep(_POLL_S)
            for path in self.directory.glob(f"{layer.hex}.*{_TEMPORARY}*"):
                path.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def trim(self, limit_bytes: int = LIMIT_BYTES) -> int:
        """Remove the indexes that were not used for longest, down to ``limit_bytes``."""
        rows = sorted(self._rows())
        total = sum(size for _, size, _ in rows)
        removed = 0
        for _, size, path in rows:
            if total <= limit_bytes:
                break
            path.unlink(missing_ok=True)
            path.with_suffix(WINDOWS_SUFFIX).unlink(missing_ok=True)
            total -= size
            removed += 1
        return removed

    def _rows(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.directory.glob(f"*{INDEX_SUFFIX}"):
            size, used = 0, 0.0
            for file in (path, path.with_suffix(WINDOWS_SUFFIX)):
                with contextlib.suppress(OSError):
                    facts = file.stat()
                    size += facts.st_size
                    used = max(used, facts.st_mtime)
            yield used, size, path


def check_windows(index: LayerIndex, path: Path) -> None:
    """RefusedError unless ``path`` holds all the windows of ``index``, each as it promises."""
    if index.windows_bytes:
        try:
            length = path.stat().st_size
        except OSError as error:
            raise RefusedError(f"{path}: {error.strerror}") from None
        if length != index.windows_bytes:
            raise RefusedError(
                f"{path} is {length} bytes long, its index promises {index.windows_bytes}"
            )
    for number in range(index.checkpoint_count):
        index.restart_point(index.checkpoint(number))


def _locked(descriptor: int, place: int) -> bool:
    """Try for the lock of one byte of the file; it ends when the descriptor is closed."""
    # struct flock of Linux: type, whence, start, length, pid
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True
