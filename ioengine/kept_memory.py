"""Memory that outlives this process because others hold its descriptor, and never reaches a disk.

An anonymous file (memfd_create(2)) whose size is sealed, in two halves: what is saved goes into the
half that does not count, and counts from the moment its header is whole. A process that is killed
in a save leaves what was saved before. It does not know what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import struct
from typing import Final

_MAGIC: Final = b"EMBKEPT1"
_HEADER: Final = struct.Struct("<8sQQ32s")  # magic, number of the save, length, sum
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MFD_NOEXEC_SEAL: Final = 8  # Linux 6.3; this lives beside a guard, which needs 6.14


class KeptMemory:
    """One value of up to ``capacity_bytes``. For one process at a time, and one thread of it."""

    def __init__(self, fd: int) -> None:
        """Take ``fd`` over; OSError (EINVAL) if it is no memory of this kind, and it stays open."""
        size = os.fstat(fd).st_size
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or size <= 2 * _HEADER.size:
            raise OSError(errno.EINVAL, "not a sealed memory that was kept")
        self._fd = fd
        self._half_bytes = size // 2
        self._map = mmap.mmap(fd, size)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._number, self._half, self._length = max(self._look(half) for half in (0, 1))

    @classmethod
    def make(cls, name: str, capacity_bytes: int) -> KeptMemory:
        """New and empty; ``name`` is what /proc shows. Takes no more memory than is in use."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
        try:
            os.ftruncate(fd, 2 * (_HEADER.size + capacity_bytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def capacity_bytes(self) -> int:
        """The longest value that fits."""
        return self._half_bytes - _HEADER.size

    def fileno(self) -> int:
        """What others must hold; it stays this object's."""
        return self._fd

    def load(self) -> bytes:
        """What was saved last; empty if nothing was."""
        start = self._half * self._half_bytes + _HEADER.size
        return self._map[start : start + self._length]

    def save(self, data: bytes) -> None:
        """Keep ``data`` instead of what was kept before, of which nothing stays.

        ValueError if it is too long, or after the end.
        """
        if len(data) > self.capacity_bytes:
            raise ValueError(f"{len(data)} bytes do not fit into {self.capacity_bytes}")
        before, length = self._half * self._half_bytes, self._length
        half, number = 1 - self._half, self._number + 1
        start = half * self._half_bytes
        self._map[start + _HEADER.size : start + _HEADER.size + len(data)] = data
        header = _HEADER.pack(_MAGIC, number, len(data), _sum(data))
        self._map[start : start + _HEADER.size] = header
        self._number, self._half, self._length = number, half, len(data)
        self._map[before : before + _HEADER.size + length] = bytes(_HEADER.size + length)

    def close(self) -> None:
        """Let go of it; whoever holds the descriptor still has what was saved."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def _look(self, half: int) -> tuple[int, int, int]:
        """Number, half and length of the value in ``half``; the number is 0 if there is none."""
        start = half * self._half_bytes
        magic, number, length, wanted = _HEADER.unpack_from(self._map, start)
        if magic != _MAGIC or length > self.capacity_bytes:
            return 0, half, 0
        start += _HEADER.size
        if _sum(self._map[start : start + length]) != wanted:
            return 0, half, 0
        return number, half, length


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
