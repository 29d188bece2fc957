"""What must hold of the buffer pool: alignment, bounds, order, and no loan of a buffer in use."""

from __future__ import annotations

import asyncio

import pytest

from ioengine._native import ffi
from ioengine.buffers import ALIGNMENT_BYTES, Buffer, BufferPool


def address(buffer: Buffer) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer.memory)))


async def test_buffers_are_aligned_writable_and_apart() -> None:
    pool = BufferPool(3, 8192)
    async with pool.take() as first, pool.take() as second, pool.take() as third:
        held = [first, second, third]
        assert all(address(buffer) % ALIGNMENT_BYTES == 0 for buffer in held)
        for buffer in held:
            buffer.memory[:] = bytes([buffer.number + 1]) * 8192
        assert sorted(bytes(buffer.memory[-1:]) for buffer in held) == [b"\x01", b"\x02", b"\x03"]
        assert len(pool.arena) == 3 * 8192


async def test_one_too_many_waits_until_one_comes_back_first_come_first() -> None:
    pool = BufferPool(1, 4096)
    served: list[int] = []

    async def user(number: int) -> None:
        async with pool.take():
            served.append(number)
            await asyncio.sleep(0)

    async with pool.take():
        users = [asyncio.create_task(user(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert served == []
    await asyncio.gather(*users)
    assert served == [0, 1, 2, 3, 4]
    assert pool.free_count == 1


async def test_a_cancelled_waiter_takes_nothing_with_it() -> None:
    pool = BufferPool(1, 4096)
    async with pool.take():
        waiter = asyncio.create_task(pool.take().__aenter__())
        await asyncio.sleep(0)
        waiter.cancel()
        assert isinstance((await asyncio.gather(waiter, return_exceptions=True))[0], BaseException)
    async with asyncio.timeout(5), pool.take() as buffer:
        assert buffer.lent


async def test_a_failure_inside_the_block_gives_the_buffer_back() -> None:
    pool = BufferPool(1, 4096)
    with pytest.raises(KeyError):
        async with pool.take():
            raise KeyError("user's own")
    assert pool.free_count == 1


async def test_a_pinned_buffer_stays_out_until_its_last_request_is_over() -> None:
    pool = BufferPool(1, 4096)
    async with pool.take() as buffer:
        buffer.pin()
        buffer.pin()
    assert (buffer.lent, pool.free_count) == (False, 0)
    buffer.unpin()
    assert pool.free_count == 0
    buffer.unpin()
    assert pool.free_count == 1


@pytest.mark.parametrize(("count", "buffer_bytes"), [(0, 4096), (1, 0), (1, 4095), (1, 5000)])
def test_senseless_sizes_are_refused(count: int, buffer_bytes: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BufferPool(count, buffer_bytes)
