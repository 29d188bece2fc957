"""The thread engine: the same contract where io_uring is denied, by preadv and pwritev.

A fixed number of threads; each request runs to its end in one of them, without the GIL while the
kernel works. The threads touch nothing but the request: completions are set in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ioengine.buffers import Buffer, BufferPool
from ioengine.engine import Completion, Gate, check_request, failure

_SECTOR_BYTES = 512
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class ThreadEngine:
    """IoEngine over a pool of threads. Use open(); see engine.IoEngine."""

    name = "threads"

    def __init__(
        self, pool: BufferPool, executor: ThreadPoolExecutor, depth: int, drain_timeout_s: float
    ) -> None:
        self._pool = pool
        self._executor = executor
        self._gate = Gate(depth)
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()

    @classmethod
    def open(
        cls,
        pool: BufferPool,
        *,
        workers: int = 8,
        depth: int = 64,
        drain_timeout_s: float = 30.0,
        executor: ThreadPoolExecutor | None = None,
    ) -> ThreadEngine:
        """Start with ``workers`` threads (or those of ``executor``, which it then owns).

        OSError(EAGAIN) if the process may not have that many threads.
        """
        return cls(pool, executor or _start(workers), depth, drain_timeout_s)

    def buffers(self) -> BufferPool:
        return self._pool

    async def read(self, fd: int, buffer: Buffer, file_offset: int, length: int) -> int:
        check_request(self._pool, buffer, file_offset, length)
        if length == 0:
            return 0
        result = await self._run(
            lambda: read_fully(fd, buffer.memory[:length], file_offset), buffer
        )
        if result < 0:
            raise failure(-result, "read", fd, file_offset, length)
        return result

    async def write(
        self, fd: int, buffer: Buffer, file_offset: int, length: int, *, sync: bool = False
    ) -> int:
        check_request(self._pool, buffer, file_offset, length)
        if length == 0 and not sync:
            return 0
        result = await self._run(
            lambda: write_fully(fd, buffer.memory[:length], file_offset, sync=sync), buffer
        )
        if result < 0:
            raise failure(-result, "write", fd, file_offset, length)
        return result

    async def fdatasync(self, fd: int) -> None:
        result = await self._run(lambda: _sync(fd), None)
        if result < 0:
            raise failure(-result, "fdatasync", fd, 0, 0)

    async def close(self) -> None:
        await self._gate.shut(self._drain_timeout_s)
        self._executor.shutdown(wait=True)

    async def _run(self, request: Callable[[], int], buffer: Buffer | None) -> int:
        """Run ``request`` in a thread: its count, or its negative errno."""
        async with self._gate:
            completion = Completion(loop=self._loop)
            if buffer is not None:
                buffer.pin()
            try:
                self._executor.submit(self._work, request, completion)
                return await completion
            finally:
                if buffer is not None:
                    buffer.unpin()

    def _work(self, request: Callable[[], int], completion: Completion) -> None:
        try:
            result = request()
        except OSError as error:
            result = -(error.errno or errno.EIO)
        with contextlib.suppress(RuntimeError):  # the loop was closed over our head: nobody waits
            self._loop.call_soon_threadsafe(completion.set_result, result)


def _start(workers: int) -> ThreadPoolExecutor:
    """An executor whose threads all run: none has to be started, and could fail, with a request.

    (An executor that can't start a thread raises, yet keeps the request and runs it later.)
    """
    executor = ThreadPoolExecutor(workers, thread_name_prefix="ember-io")
    together = threading.Barrier(workers + 1)
    try:
        for _ in range(workers):
            executor.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        executor.shutdown(wait=True)
        raise OSError(errno.EAGAIN, f"the I/O engine can't start {workers} threads") from error
    together.wait()
    return executor


def read_fully(fd: int, memory: memoryview, file_offset: int) -> int:
    """preadv(2) until ``memory`` is full or the file ends; the count. Raises OSError."""
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(fd, [memory[done:]], file_offset + done)
        except OSError as error:
            # A direct read that stopped off a sector met the end of the file: no more to ask.
            if error.errno == errno.EINVAL and done % _SECTOR_BYTES:
                break
            raise
        if count == 0:
            break
        done += count
    return done


def write_fully(fd: int, data: bytes | memoryview, file_offset: int, *, sync: bool = False) -> int:
    """pwrite(2) until all of ``data`` is written, then fdatasync; the count. Raises OSError."""
    memory, done = memoryview(data), 0
    while done < len(memory):
        count = os.pwrite(fd, memory[done:], file_offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file takes no more bytes and gives no reason")
        done += count
    if sync:
        os.fdatasync(fd)
    return done


def start_writing_back(fd: int, file_offset: int, length: int) -> None:
    """Have the kernel begin to put a written range on the disk: a later sync finds less to do.

    Only a hint (sync_file_range(2)): what goes wrong, that sync will tell.
    """
    _libc.sync_file_range(fd, file_offset, length, _SYNC_FILE_RANGE_WRITE)


def _sync(fd: int) -> int:
    os.fdatasync(fd)
    return 0
