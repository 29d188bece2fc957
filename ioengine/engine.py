"""The contract of an I/O engine: reads, writes and fdatasync that complete, on files by number.

A request, once accepted, is over before its await ends, whatever happens to the caller: a
cancelled caller gets its CancelledError after the kernel has let go of buffer and descriptor.
Knows nothing of paths, chunks or digests. Implementations: uring.py, threads.py, and the seeded
faulty twin of the tests; one conformance suite holds for all of them.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ioengine.buffers import Buffer, BufferPool


class IoEngine(Protocol):
    """Moves bytes between files and the buffers of its own pool.

    Life: opened inside a running event loop, used from that loop's thread only, closed once.
    Direct descriptors (O_DIRECT) want offset and length at multiples of the device's alignment;
    the buffers are aligned already.
    """

    @property
    def name(self) -> str:
        """``uring``, ``threads``, …: what ``ember status`` shows."""
        ...

    async def read(self, fd: int, buffer: Buffer, file_offset: int, length: int) -> int:
        """Read ``length`` bytes at ``file_offset`` to the start of ``buffer``.

        Returns the count: less than ``length`` only where the file ends. OSError names the
        file; the buffer's content is undefined then. ValueError: senseless arguments.
        """
        ...

    async def write(
        self, fd: int, buffer: Buffer, file_offset: int, length: int, *, sync: bool = False
    ) -> int:
        """Write the first ``length`` bytes of ``buffer`` at ``file_offset``; returns ``length``.

        With ``sync`` an fdatasync follows the write before the request is over. After an
        OSError any part of the bytes may have been written.
        """
        ...

    async def fdatasync(self, fd: int) -> None:
        """Put on the disk what was written, in requests that are over, to the file of ``fd``."""
        ...

    def buffers(self) -> BufferPool:
        """The engine's pool; buffers of another pool are refused."""
        ...

    async def close(self) -> None:
        """Wait for what is in flight, then let go of everything. Later requests fail (EBADF).

        OSError(ETIMEDOUT): the disk doesn't answer; all stays as it is, since the kernel may
        still use the buffers. Closing twice is fine.
        """
        ...


class Completion(asyncio.Future[int]):
    """The outcome of one request. It can't be cancelled: the kernel is still at work on it.

    A task that is cancelled while it awaits one wakes up with CancelledError when it is done
    (asyncio keeps the request to cancel for the next step of the task).
    """

    def cancel(self, msg: object = None) -> bool:
        """Refuse; the request goes on."""
        del msg
        return False


class Gate:
    """Bounds the requests in flight, and lets close() wait for the last of them."""

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"an engine needs room for at least one request, not {depth}")
        self._room = asyncio.Semaphore(depth)
        self._in_flight = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def in_flight(self) -> int:
        """Requests that were let in and are not over."""
        return self._in_flight

    async def __aenter__(self) -> None:
        self._check_open()
        await self._room.acquire()
        if self._closed:
            self._room.release()
        self._check_open()
        self._in_flight += 1
        self._empty.clear()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in_flight -= 1
        self._room.release()
        if self._in_flight == 0:
            self._empty.set()

    async def shut(self, timeout_s: float) -> None:
        """Let nobody in any more and wait for the rest; OSError(ETIMEDOUT) says how many hang."""
        self._closed = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"{self._in_flight} I/O requests are still in flight after {timeout_s:g} s: "
                "the disk does not answer",
            ) from None

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the I/O engine is closed")


def check_request(pool: BufferPool, buffer: Buffer, file_offset: int, length: int) -> None:
    """ValueError unless the buffer is ours, lent, and the range makes sense."""
    if buffer.pool is not pool:
        raise ValueError("the buffer belongs to another engine's pool")
    if not buffer.lent:
        raise ValueError("the buffer was given back to its pool already")
    if not 0 <= length <= len(buffer):
        raise ValueError(f"a request of {length} bytes does not fit a buffer of {len(buffer)}")
    if file_offset < 0 or file_offset + length >= 1 << 63:
        raise ValueError(f"no file has an offset of {file_offset}")


def failure(number: int, doing: str, fd: int, file_offset: int, length: int) -> OSError:
    """The OSError of a failed request: what was done, to which file, where."""
    try:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        name = "a file that is not open"
    place = f" at {file_offset}+{length}" if length else ""
    return OSError(number, f"{doing} {name} (fd {fd}){place}: {os.strerror(number)}")
