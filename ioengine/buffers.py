"""A bounded pool of aligned buffers, for direct I/O and for pinning by a ring.

One arena of anonymous memory, huge-page aligned, cut into equal buffers. A buffer goes back to
the pool only when nobody holds it *and* no request is using it: its bytes never change under an
I/O that is still in flight. Knows nothing of files, rings or chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator

from ioengine._native import ffi

BUFFER_BYTES = 1 << 20
"""Usual size of a buffer: the largest transfer that one request moves."""

ALIGNMENT_BYTES = 4096
"""Every buffer starts at a multiple of this, which satisfies O_DIRECT on any block device."""

_HUGE_PAGE_BYTES = 2 << 20


class Buffer:
    """``pool.buffer_bytes`` of memory, lent by a pool. Use it between take and give-back only."""

    __slots__ = ("_in_flight", "_lent", "_memory", "_pool", "number")

    def __init__(self, pool: BufferPool, number: int, memory: memoryview) -> None:
        self.number = number
        self._pool = pool
        self._memory = memory
        self._lent = False
        self._in_flight = 0

    @property
    def memory(self) -> memoryview:
        """The whole buffer, writable; leave it alone while a request on it is in flight."""
        return self._memory

    @property
    def pool(self) -> BufferPool:
        """The pool that the buffer belongs to."""
        return self._pool

    @property
    def lent(self) -> bool:
        """Whether somebody holds the buffer."""
        return self._lent

    @property
    def in_flight(self) -> int:
        """How many requests are using the buffer now."""
        return self._in_flight

    def __len__(self) -> int:
        return len(self._memory)

    def pin(self) -> None:
        """A request starts to use the buffer: it stays out of the pool until unpin()."""
        self._in_flight += 1

    def unpin(self) -> None:
        """The request is over; a buffer that was given back meanwhile is free from now on."""
        self._in_flight -= 1
        if not self._lent and self._in_flight == 0:
            self._pool._put_back(self)


class BufferPool:
    """``count`` buffers of ``buffer_bytes`` each; who asks for one more waits, first come first.

    A forked child does not inherit the memory (a copy-on-write of pinned pages would part the
    kernel's copy from ours), so a child that lives on without exec must not touch a buffer.
    """

    def __init__(self, count: int = 32, buffer_bytes: int = BUFFER_BYTES) -> None:
        if count < 1 or buffer_bytes < ALIGNMENT_BYTES or buffer_bytes % ALIGNMENT_BYTES:
            raise ValueError(
                f"a pool needs at least one buffer of a multiple of {ALIGNMENT_BYTES} bytes, "
                f"not {count} of {buffer_bytes}"
            )
        self.count = count
        self.buffer_bytes = buffer_bytes
        self._arena = _arena(count * buffer_bytes)
        self._buffers = [
            Buffer(self, number, self._arena[number * buffer_bytes : (number + 1) * buffer_bytes])
            for number in range(count)
        ]
        self._free = list(reversed(self._buffers))
        self._available = asyncio.Semaphore(count)

    @property
    def arena(self) -> memoryview:
        """All buffers, one behind the other; for registration with a ring."""
        return self._arena

    @property
    def free_count(self) -> int:
        """How many buffers nobody holds and no request uses."""
        return len(self._free)

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Buffer]:
        """Lend one buffer for the length of the block; waits while all are lent.

        Its content is whatever its last user left there.
        """
        await self._available.acquire()
        buffer = self._free.pop()
        buffer._lent = True
        try:
            yield buffer
        finally:
            buffer._lent = False
            if buffer.in_flight == 0:
                self._put_back(buffer)

    def _put_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)
        self._available.release()


def _arena(length_bytes: int) -> memoryview:
    """Anonymous private memory that starts at a huge page, where the kernel has some to give."""
    # mmap aligns to 4 KiB only; the slack lets the arena start where a huge page can.
    mapping = mmap.mmap(
        -1, length_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    start = -int(ffi.cast("uintptr_t", ffi.from_buffer(view))) % _HUGE_PAGE_BYTES
    return view[start : start + length_bytes]
