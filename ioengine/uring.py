"""The io_uring engine: requests are queued through one event-loop turn and submitted as a batch.

The ring tells the loop by an eventfd; the loop collects completions, continues what was short,
then wakes the callers. The kernel work is csrc/ring.c's. Must not be shared between threads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

from ioengine._native import ffi, lib
from ioengine.buffers import Buffer, BufferPool
from ioengine.engine import Completion, Gate, check_request, failure
from ioengine.errors import check

log = logging.getLogger(__name__)

_SUBMIT_AGAIN_S = 0.001


class UringEngine:
    """IoEngine over io_uring with registered buffers. Use open(); see engine.IoEngine."""

    name = "uring"

    def __init__(self, ring: Any, pool: BufferPool, depth: int, drain_timeout_s: float) -> None:
        self._ring = ring
        self._pool = pool
        self._gate = Gate(depth)
        self._drain_timeout_s = drain_timeout_s
        self._waiting: list[Completion | None] = [None] * depth
        self._done = ffi.new("struct ember_ring_done[]", depth)
        self._depth = depth
        self._loop = asyncio.get_running_loop()
        self._submission: asyncio.Handle | None = None
        self._event = lib.ember_ring_eventfd(ring)
        self._loop.add_reader(self._event, self._collect)

    @classmethod
    def open(
        cls, pool: BufferPool, *, depth: int = 64, drain_timeout_s: float = 30.0
    ) -> UringEngine:
        """Set up a ring for ``depth`` requests in flight, in the running loop's thread.

        OSError where the kernel denies io_uring (EPERM, ENOSYS) or lacks an operation
        (EOPNOTSUPP); probe.py explains it.
        """
        out = ffi.new("ember_ring **")
        arena = ffi.from_buffer(pool.arena)
        result = lib.ember_ring_open(depth, arena, pool.count, pool.buffer_bytes, out)
        check(result, "set up io_uring")
        return cls(out[0], pool, depth, drain_timeout_s)

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
            slot = lib.ember_ring_read(self._ring, fd, buffer.number, length, file_offset)
            result = await self._complete(slot, buffer)
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
            slot = lib.ember_ring_write(
                self._ring, fd, buffer.number, length, file_offset, int(sync)
            )
            result = await self._complete(slot, buffer)
        if result < 0:
            raise failure(-result, "write", fd, file_offset, length)
        return result

    async def fdatasync(self, fd: int) -> None:
        async with self._gate:
            result = await self._complete(lib.ember_ring_sync(self._ring, fd), None)
        if result < 0:
            raise failure(-result, "fdatasync", fd, 0, 0)

    async def close(self) -> None:
        if not self._ring:
            return
        await self._gate.shut(self._drain_timeout_s)
        if not self._ring:
            return
        if self._submission is not None:
            self._submission.cancel()
        self._loop.remove_reader(self._event)
        ring, self._ring = self._ring, ffi.NULL
        check(lib.ember_ring_close(ring), "close the ring")

    async def _complete(self, slot: int, buffer: Buffer | None) -> int:
        """Wait for the request in ``slot``: its count, or the negative errno."""
        if slot < 0:
            return slot
        completion = Completion(loop=self._loop)
        self._waiting[slot] = completion
        if self._submission is None:
            self._submission = self._loop.call_soon(self._submit)
        if buffer is None:
            return await completion
        buffer.pin()
        try:
            return await completion
        finally:
            buffer.unpin()

    def _submit(self) -> None:
        """Hand the turn's batch to the kernel; when it has no room now, try again soon."""
        self._submission = None
        result = lib.ember_ring_submit(self._ring)
        if result == -errno.EAGAIN:
            self._submission = self._loop.call_later(_SUBMIT_AGAIN_S, self._submit)
        elif result < 0:
            log.error("io_uring refuses submissions for good: %s", errno.errorcode[-result])

    def _collect(self) -> None:
        """The eventfd rang: wake the callers of what is over, queue on what was short."""
        count = lib.ember_ring_reap(self._ring, self._done, self._depth)
        for index in range(count):
            done = self._done[index]
            slot = done.slot
            completion, self._waiting[slot] = self._waiting[slot], None
            if completion is not None:
                completion.set_result(done.result)
        if self._submission is None and lib.ember_ring_active(self._ring):
            self._submit()
