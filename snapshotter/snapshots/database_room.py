"""Room on the disk for the database: some in reserve, and none missing where the kernel would kill.

What is set aside is given up when the disk is full, so that the database can be opened and removals
can still be recorded.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from pathlib import Path
from typing import Final

from ioengine.directories import sync_directory
from snapshotter.errors import NoSpaceError

_log = logging.getLogger(__name__)

RESERVE_BYTES: Final = 4 * 1024 * 1024
_RESERVES: Final = [RESERVE_BYTES >> halvings for halvings in range(5)]
FULL_BYTES: Final = 128 * 1024
SHARED_BYTES: Final = 96 * 1024
"""What sqlite's index of the log takes at most: 32 KiB for some 4000 pages of it."""
OPEN_BYTES: Final = 256 * 1024
AMPLE_BYTES: Final = 16 * 1024 * 1024
"""With so much nothing has to be tried."""


class DatabaseRoom:
    """Blocks; used by the database's threads one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.with_name(path.name + ".reserve")
        self._shared = -1

    def see_to(self) -> None:
        """Before the database is opened; NoSpaceError if there is too little.

        sqlite stores into a mapped file of holes: where no block is left for one of them the
        kernel ends the process (SIGBUS), and nobody hears why.
        """
        if self.free_bytes() >= AMPLE_BYTES or self._can_take(OPEN_BYTES):
            return
        if self.has_reserve():
            _log.error("%s: disk nearly full, giving up the reserve to open it", self._path)
            self.give_up_reserve()
            sync_directory(self._path.parent)  # a journaling file system frees with its next commit
            if self._can_take(OPEN_BYTES):
                return
        if os.statvfs(self._path.parent).f_frsize < mmap.PAGESIZE:
            raise self.none_left()

    def _can_take(self, length: int) -> bool:
        """Tried: of what a file system calls free it keeps some to itself."""
        trial = self._path.with_name(self._path.name + ".trial")
        try:
            descriptor = os.open(trial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                return _allocated(descriptor, length)
            finally:
                os.close(descriptor)
                trial.unlink()
                sync_directory(self._path.parent)
        except OSError as error:
            _log.warning("%s can't be tried: %s", trial, error)
            return False

    def allocate_shared(self) -> None:
        """Once it is open: no holes in what sqlite maps, also when its log grows later on.

        The descriptor stays open: closing one ends all locks that this process has on the file.
        """
        try:
            self._shared = os.open(f"{self._path}-shm", os.O_RDWR | os.O_CLOEXEC)
            os.posix_fallocate(self._shared, 0, SHARED_BYTES)
        except OSError as error:
            _log.warning("%s-shm can't be allocated: %s", self._path, error)

    def close(self) -> None:
        """After the last connection."""
        if self._shared >= 0:
            os.close(self._shared)
            self._shared = -1

    def has_reserve(self) -> bool:
        """Whether something is set aside."""
        return self._reserve.exists()

    def give_up_reserve(self) -> None:
        """Let the database have what was set aside."""
        self._reserve.unlink(missing_ok=True)

    def keep_reserve(self) -> None:
        """Set aside what is missing of the reserve, or as much as there is room for."""
        try:
            descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.warning("no room for %s: %s", self._reserve, error)
            return
        try:
            kept = next((n for n in _RESERVES if _allocated(descriptor, n)), 0)
            if not kept:
                self.give_up_reserve()
            if kept < RESERVE_BYTES:
                _log.warning("little room for %s: %d bytes", self._reserve, kept)
        finally:
            os.close(descriptor)

    def free_bytes(self) -> int:
        """What root may still write: the file system gives it the last blocks too."""
        status = os.statvfs(self._path.parent)
        return status.f_bfree * status.f_frsize

    def is_full(self) -> bool:
        """Whether an error of sqlite that doesn't say so is that of a full disk."""
        status = os.statvfs(self._path.parent)
        return status.f_bavail * status.f_frsize < FULL_BYTES

    def none_left(self) -> NoSpaceError:
        """What to say."""
        return NoSpaceError(f"no room on the file system of {self._path}; free some space there")


def _allocated(descriptor: int, length: int) -> bool:
    """Make a file ``length`` bytes long, all of them there; False, and it is empty, if they can't
    be had."""
    try:
        os.posix_fallocate(descriptor, 0, length)
        os.ftruncate(descriptor, length)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        return False
    return True
