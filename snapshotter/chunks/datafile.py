"""The sparse file that holds a view's bytes, open twice: through the page cache and around it.

Invariant: a descriptor is closed only when no operation uses it, since its number would be given
to another file at once. It does not know which of its bytes mean anything.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from ioengine.threads import write_fully
from snapshotter.chunks.presence import BLOCK
from snapshotter.chunks.space import Space, is_full
from snapshotter.errors import FailedPreconditionError, UnavailableError


class DiskError(UnavailableError):
    """The cache's own disk refuses a view's file; no source of bytes is to blame."""


class ClosedError(FailedPreconditionError):
    """The view was let go of under its user: whoever asks again has it opened again."""


def padded(length: int) -> int:
    """``length`` rounded up to whole blocks: the size of the file of a view of that length."""
    return -(-length // BLOCK) * BLOCK


def create_sparse(path: Path, length: int) -> bool:
    """Make sure that ``path`` is a file of padded(length) bytes; whether it was so already.

    The caller syncs the directory. A file of another size is emptied first: it is not this view's.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size == padded(length) and length:
            return True
        os.ftruncate(fd, 0)
        os.ftruncate(fd, padded(length))
        os.fsync(fd)
        return False
    finally:
        os.close(fd)


class DataFile:
    """An open data file; ``use()`` brackets every operation, from any thread or the loop."""

    def __init__(self, path: Path, space: Space) -> None:
        self.path = path
        self._space = space
        self._idle = threading.Condition()
        self._users = 0
        self._closed = False
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self.direct_fd = -1  # a file system without O_DIRECT: everything is buffered
        status = os.fstat(self.fd)
        self.inode, self.device = status.st_ino, status.st_dev

    @property
    def bulk_fd(self) -> int:
        """The descriptor for aligned bulk transfers."""
        return self.direct_fd if self.direct_fd >= 0 else self.fd

    def write_buffered(self, offset: int, data: bytes | memoryview, *, demand: bool) -> None:
        """Reserve and write through the page cache; blocks. NoSpaceError, DiskError."""
        with self.use():
            self._space.reserve(self.fd, offset, len(data), demand=demand)
            write_fully(self.fd, data, offset)

    def reserve(self, offset: int, length: int) -> None:
        """Reserve for a background write; blocks. NoSpaceError, DiskError."""
        with self.use():
            self._space.reserve(self.fd, offset, length, demand=False)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the descriptors open, and translate what the disk says.

        ClosedError once closed, NoSpaceError when full, DiskError otherwise.
        """
        with self._idle:
            if self._closed:
                raise ClosedError(f"{self.path} was closed in the meantime; ask again")
            self._users += 1
        try:
            yield
        except OSError as error:
            if is_full(error):
                raise self._space.full(error.strerror or "full") from error
            raise DiskError(
                f"{self.path} cannot be used ({error.strerror}); look at the disk"
            ) from error
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Refuse new users, wait for those there are, close; blocks. Twice is harmless."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._users == 0)
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)
