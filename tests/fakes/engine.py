"""The seeded faulty twin of the I/O engines: same contract, faults drawn from one seed.

It works at once on the descriptors it is given, but completes in another order, splits transfers,
fails, fills up, and loses what was never synced at crash(). The same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ioengine.buffers import Buffer, BufferPool
from ioengine.engine import Completion, Gate, check_request, failure

SECTOR_BYTES = 512
"""What a disk writes wholly or not at all."""


@dataclass(slots=True)
class Faults:
    """What goes wrong; may be changed while the engine runs.

    ``error_rate``: share of requests that fail with one of ``errors``; ``delay_turns``: the most
    turns of the event loop by which a completion comes late; ``space_bytes``: what may still be
    written before ENOSPC, None: without end.
    """

    error_rate: float = 0.0
    errors: tuple[int, ...] = (errno.EIO,)
    delay_turns: int = 0
    space_bytes: int | None = None


@dataclass(slots=True)
class Unsynced:
    """One file's sectors as they were before the first write that no fdatasync has covered."""

    fd: int
    size_bytes: int
    sectors: dict[int, bytes] = field(default_factory=dict)


class FaultyEngine:
    """IoEngine with seeded faults. See engine.IoEngine for the contract."""

    name = "faulty"

    def __init__(
        self, seed: int = 0, faults: Faults | None = None, *, count: int = 8, depth: int = 8
    ) -> None:
        self.faults = faults or Faults()
        self._random = random.Random(seed)
        self._pool = BufferPool(count)
        self._gate = Gate(depth)
        self._unsynced: dict[tuple[int, int], Unsynced] = {}

    def buffers(self) -> BufferPool:
        return self._pool

    async def read(self, fd: int, buffer: Buffer, file_offset: int, length: int) -> int:
        check_request(self._pool, buffer, file_offset, length)
        if length == 0:
            return 0

        def move() -> int:
            return self._read(fd, buffer.memory[:length], file_offset)

        result = await self._run(move, buffer)
        if result < 0:
            raise failure(-result, "read", fd, file_offset, length)
        return result

    async def write(
        self, fd: int, buffer: Buffer, file_offset: int, length: int, *, sync: bool = False
    ) -> int:
        check_request(self._pool, buffer, file_offset, length)
        if length == 0 and not sync:
            return 0

        def move() -> int:
            self._write(fd, buffer.memory[:length], file_offset)
            return self._sync(fd) + length if sync else length

        result = await self._run(move, buffer)
        if result < 0:
            raise failure(-result, "write", fd, file_offset, length)
        return result

    async def fdatasync(self, fd: int) -> None:
        result = await self._run(lambda: self._sync(fd), None)
        if result < 0:
            raise failure(-result, "fdatasync", fd, 0, 0)

    async def close(self) -> None:
        await self._gate.shut(30.0)
        while self._unsynced:
            os.close(self._unsynced.popitem()[1].fd)

    def crash(self) -> None:
        """The power fails: each sector written since the last fdatasync is kept or lost.

        What a file had grown by is lost with its sectors; the descriptors stay usable, as after
        the files were opened anew.
        """
        for file in self._unsynced.values():
            size_bytes = os.fstat(file.fd).st_size
            for sector, before in sorted(file.sectors.items()):
                if self._random.random() < 0.5:
                    start = sector * SECTOR_BYTES
                    length = min(SECTOR_BYTES, size_bytes - start)
                    os.pwrite(file.fd, before.ljust(length, b"\0"), start)
            if self._random.random() < 0.5:
                os.truncate(file.fd, file.size_bytes)
            os.close(file.fd)
        self._unsynced.clear()

    async def _run(self, move: Callable[[], int], buffer: Buffer | None) -> int:
        async with self._gate:
            completion = Completion()
            if buffer is not None:
                buffer.pin()
            try:
                self._later(self._random.randint(0, self.faults.delay_turns), move, completion)
                return await completion
            finally:
                if buffer is not None:
                    buffer.unpin()

    def _later(self, turns: int, move: Callable[[], int], completion: Completion) -> None:
        """Do the request ``turns`` turns of the loop from the next on."""
        loop = asyncio.get_running_loop()
        if turns > 0:
            loop.call_soon(self._later, turns - 1, move, completion)
            return
        loop.call_soon(self._do, move, completion)

    def _do(self, move: Callable[[], int], completion: Completion) -> None:
        if self._random.random() < self.faults.error_rate:
            completion.set_result(-self._random.choice(self.faults.errors))
            return
        try:
            completion.set_result(move())
        except OSError as error:
            completion.set_result(-(error.errno or errno.EIO))

    def _read(self, fd: int, memory: memoryview, file_offset: int) -> int:
        """Read in pieces that the seed chooses, as a kernel may."""
        piece_bytes = _unit_bytes(fd, file_offset, len(memory))
        done = 0
        while done < len(memory):
            pieces = self._random.randint(1, -(-(len(memory) - done) // piece_bytes))
            part = memory[done : done + pieces * piece_bytes]
            count = os.preadv(fd, [part], file_offset + done)
            done += count
            if count == 0 or count % piece_bytes:
                break
        return done

    def _write(self, fd: int, data: memoryview, file_offset: int) -> None:
        """Write all of ``data``, or as much as there is room for and raise ENOSPC."""
        unit_bytes = _unit_bytes(fd, file_offset, len(data))
        room = self.faults.space_bytes
        part = data if room is None else data[: room // unit_bytes * unit_bytes]
        if part:
            self._remember(fd, file_offset, len(part))
            os.pwritev(fd, [part], file_offset)
        if room is not None:
            self.faults.space_bytes = room - len(part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remember(self, fd: int, file_offset: int, length: int) -> None:
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if key not in self._unsynced:
            # A descriptor of our own: the caller may close its before the crash.
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            self._unsynced[key] = Unsynced(again, status.st_size)
        file = self._unsynced[key]
        for sector in range(
            file_offset // SECTOR_BYTES, -(-(file_offset + length) // SECTOR_BYTES)
        ):
            if sector not in file.sectors:
                file.sectors[sector] = os.pread(file.fd, SECTOR_BYTES, sector * SECTOR_BYTES)

    def _sync(self, fd: int) -> int:
        os.fdatasync(fd)
        status = os.fstat(fd)
        file = self._unsynced.pop((status.st_dev, status.st_ino), None)
        if file is not None:
            os.close(file.fd)
        return 0


def _unit_bytes(fd: int, file_offset: int, length: int) -> int:
    """How finely a transfer may be cut: by sectors on a direct descriptor, else by bytes.

    OSError(EINVAL) if a direct transfer is not aligned to sectors.
    """
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return 1
    if file_offset % SECTOR_BYTES or length % SECTOR_BYTES:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return SECTOR_BYTES
