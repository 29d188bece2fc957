"""The io_uring engine: the requests of one event-loop turn go to the kernel as one batch.

The ring tells the loop by an eventfd; one native call per turn submits and collects, so however
many requests there are the GIL changes hands once. A slot belongs to one request from its start
to its completion. The kernel work is csrc/ring.c's. Must not be shared between threads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
from typing import Any

from ioengine._native import ffi, lib
from ioengine.buffers import ALIGNMENT_BYTES, Buffer, BufferPool
from ioengine.engine import Completion, Gate, check_request, failure
from ioengine.errors import check

log = logging.getLogger(__name__)

_POSTPONED_S = 0.001
_TRIAL_TIMEOUT_MS = 10_000


class UringEngine:
    """IoEngine over io_uring with registered buffers. Use open(); see engine.IoEngine."""

    name = "uring"

    def __init__(self, ring: Any, pool: BufferPool, depth: int, drain_timeout_s: float) -> None:
        self._ring = ring
        self._pool = pool
        self._gate = Gate(depth)
        self._drain_timeout_s = drain_timeout_s
        self._free_slots = list(range(depth))
        self._waiting: list[Completion | None] = [None] * depth
        self._batch = ffi.new("struct ember_ring_request[]", depth)
        self._batched = 0
        self._done = ffi.new("struct ember_ring_done[]", depth)
        self._postponed = ffi.new("int *")
        self._loop = asyncio.get_running_loop()
        self._next_turn: asyncio.Handle | None = None
        self._event = lib.ember_ring_eventfd(ring)
        self._loop.add_reader(self._event, self._turn)

    @classmethod
    def open(
        cls, pool: BufferPool, *, depth: int = 64, drain_timeout_s: float = 30.0
    ) -> UringEngine:
        """Set up a ring for ``depth`` requests in flight, in the running loop's thread.

        OSError where the kernel denies io_uring (EPERM, ENOSYS) or lacks an operation
        (EOPNOTSUPP); probe.py explains it.
        """
        asyncio.get_running_loop()  # before there is a ring to let go of
        return cls(_open_ring(pool, depth), pool, depth, drain_timeout_s)

    @property
    def registered(self) -> bool:
        """Whether the buffers are pinned; not where RLIMIT_MEMLOCK is too small for them."""
        return bool(self._ring) and bool(lib.ember_ring_registered(self._ring))

    def buffers(self) -> BufferPool:
        return self._pool

    async def read(self, fd: int, buffer: Buffer, file_offset: int, length: int) -> int:
        check_request(self._pool, buffer, file_offset, length)
        if length == 0:
            return 0
        async with self._gate:
            request = self._request(lib.EMBER_RING_READ, fd)
            request.buffer = buffer.number
            request.offset = file_offset
            request.length = length
            result = await self._complete(request.slot, buffer)
        if result < 0:
            raise failure(-result, "read", fd, file_offset, length)
        return result

    async def write(
        self, fd: int, buffer: Buffer, file_offset: int, length: int, *, sync: bool = False
    ) -> int:
        check_request(self._pool, buffer, file_offset, length)
        if length == 0:
            if sync:
                await self.fdatasync(fd)
            return 0
        async with self._gate:
            request = self._request(lib.EMBER_RING_WRITE, fd)
            request.buffer = buffer.number
            request.offset = file_offset
            request.length = length
            request.sync = sync
            result = await self._complete(request.slot, buffer)
        if result < 0:
            raise failure(-result, "write", fd, file_offset, length)
        return result

    async def fdatasync(self, fd: int) -> None:
        async with self._gate:
            result = await self._complete(self._request(lib.EMBER_RING_SYNC, fd).slot, None)
        if result < 0:
            raise failure(-result, "fdatasync", fd, 0, 0)

    async def close(self) -> None:
        await self._gate.shut(self._drain_timeout_s)
        if not self._ring:
            return
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._loop.remove_reader(self._event)
        ring, self._ring = self._ring, ffi.NULL
        check(lib.ember_ring_close(ring), "close the ring")

    def _request(self, kind: int, fd: int) -> Any:
        """A new request of the turn's batch, with a slot of its own. The gate left room for it."""
        request = self._batch[self._batched]
        request.fd = fd  # first: a number that is no int must not cost a slot
        request.kind = kind
        request.sync = False
        request.slot = self._free_slots.pop()
        self._batched += 1
        return request

    async def _complete(self, slot: int, buffer: Buffer | None) -> int:
        """Wait for the request in ``slot``: its count, or the negative errno."""
        completion = Completion(loop=self._loop)
        self._waiting[slot] = completion
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)
        if buffer is None:
            return await completion
        buffer.pin()
        try:
            return await completion
        finally:
            buffer.unpin()

    def _turn(self) -> None:
        """Submit the batch, wake the callers of what is over; come again if the kernel was full."""
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        count, self._batched = self._batched, 0
        over = lib.ember_ring_turn(self._ring, self._batch, count, self._done, self._postponed)
        if over < 0:
            # It took none of the batch, so their callers must not wait: a fault of this file.
            log.error("the ring refuses a batch of %d: %s", count, os.strerror(-over))
            for index in range(count):
                self._finish(self._batch[index].slot, over)
        for index in range(over):
            self._finish(self._done[index].slot, self._done[index].result)
        if self._postponed[0]:
            self._next_turn = self._loop.call_later(_POSTPONED_S, self._turn)

    def _finish(self, slot: int, result: int) -> None:
        completion, self._waiting[slot] = self._waiting[slot], None
        self._free_slots.append(slot)
        if completion is not None:
            completion.set_result(result)


def try_ring(fd: int) -> None:
    """Write a page to the file ``fd`` with a linked fdatasync through a ring, and read it back.

    Blocks for some milliseconds, ten seconds at most. OSError says what of it fails here.
    """
    pool = BufferPool(1, ALIGNMENT_BYTES)
    pattern = os.urandom(ALIGNMENT_BYTES)
    ring = _open_ring(pool, 1)
    try:
        pool.arena[:] = pattern
        _move_page(ring, lib.EMBER_RING_WRITE, fd)
        pool.arena[:] = bytes(ALIGNMENT_BYTES)
        _move_page(ring, lib.EMBER_RING_READ, fd)
        if pool.arena != pattern:
            raise OSError(errno.EIO, "what the ring wrote is not what it reads")
    finally:
        lib.ember_ring_close(ring)  # refused while the disk hangs: then the ring stays


def _open_ring(pool: BufferPool, depth: int) -> Any:
    out = ffi.new("ember_ring **")
    arena = ffi.from_buffer(pool.arena)
    result = lib.ember_ring_open(depth, arena, pool.count, pool.buffer_bytes, out)
    check(result, "set up io_uring")
    return out[0]


def _move_page(ring: Any, kind: int, fd: int) -> None:
    """Move buffer 0 to or from the start of ``fd``, blocking; OSError if not all of it moves."""
    request = {"kind": kind, "fd": fd, "length": ALIGNMENT_BYTES, "sync": True}
    batch = ffi.new("struct ember_ring_request[]", [request])
    done = ffi.new("struct ember_ring_done[]", 1)
    postponed = ffi.new("int *")
    poll = select.poll()
    poll.register(lib.ember_ring_eventfd(ring), select.POLLIN)
    over = check(lib.ember_ring_turn(ring, batch, 1, done, postponed), "try the ring")
    while over == 0:
        if not poll.poll(_TRIAL_TIMEOUT_MS):
            raise TimeoutError(errno.ETIMEDOUT, "a page of I/O through the ring does not end")
        over = check(lib.ember_ring_turn(ring, ffi.NULL, 0, done, postponed), "try the ring")
    result = done[0].result
    if result != ALIGNMENT_BYTES:
        number = -result if result < 0 else errno.EIO
        raise OSError(number, f"a page of I/O through the ring fails: {os.strerror(number)}")
