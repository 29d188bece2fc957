"""What must hold of every I/O engine: the ring, the threads, and the seeded faulty twin.

The same cases run over all of them, on real files, buffered and direct.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from ioengine.buffers import BUFFER_BYTES, BufferPool
from ioengine.engine import IoEngine
from ioengine.probe import probe_direct, probe_io_uring
from ioengine.threads import ThreadEngine
from ioengine.uring import UringEngine
from tests.fakes.engine import Faults, FaultyEngine

DEPTH = 8


def engines() -> dict[str, Callable[[], IoEngine]]:
    """Every engine that this machine allows. Denied io_uring is a finding of its own (probe)."""
    found: dict[str, Callable[[], IoEngine]] = {
        "threads": lambda: ThreadEngine.open(BufferPool(DEPTH), depth=DEPTH, workers=3),
        "faulty": lambda: FaultyEngine(seed=7, faults=Faults(delay_turns=5), depth=DEPTH),
    }
    if probe_io_uring(Path(tempfile.gettempdir())).allowed:
        found["uring"] = lambda: UringEngine.open(BufferPool(DEPTH), depth=DEPTH)
    return found


@pytest.fixture(params=sorted(engines()))
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[IoEngine]:
    opened = engines()[request.param]()
    yield opened
    await opened.close()


@pytest.fixture(params=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    direct = request.param == "direct" and probe_direct(tmp_path)[0].allowed
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    fd = os.open(tmp_path / "file", flags, 0o600)
    yield fd
    os.close(fd)


async def put(engine: IoEngine, fd: int, offset: int, data: bytes, *, sync: bool = False) -> int:
    async with engine.buffers().take() as buffer:
        buffer.memory[: len(data)] = data
        return await engine.write(fd, buffer, offset, len(data), sync=sync)


async def get(engine: IoEngine, fd: int, offset: int, length: int) -> bytes:
    async with engine.buffers().take() as buffer:
        buffer.memory[:length] = b"\xee" * length
        count = await engine.read(fd, buffer, offset, length)
        return bytes(buffer.memory[:count])


async def test_what_was_written_is_read_back(engine: IoEngine, file: int) -> None:
    data = random.Random(1).randbytes(BUFFER_BYTES)
    assert await put(engine, file, 8192, data) == BUFFER_BYTES
    await engine.fdatasync(file)
    assert await get(engine, file, 8192, BUFFER_BYTES) == data
    assert await get(engine, file, 0, 8192) == bytes(8192)


async def test_a_synced_write_is_one_request(engine: IoEngine, file: int) -> None:
    assert await put(engine, file, 4096, b"s" * 4096, sync=True) == 4096
    assert await get(engine, file, 4096, 4096) == b"s" * 4096


async def test_a_read_ends_where_the_file_ends(engine: IoEngine, file: int) -> None:
    await put(engine, file, 0, b"x" * 8192)
    os.truncate(file, 5000)
    assert await get(engine, file, 0, 65536) == b"x" * 5000
    assert await get(engine, file, 4096, 4096) == b"x" * 904
    assert await get(engine, file, 8192, 4096) == b""


async def test_holes_read_as_zeros_and_offsets_beyond_4_gib_work(
    engine: IoEngine, file: int
) -> None:
    far = 5 << 30
    await put(engine, file, far, b"f" * 4096)
    assert await get(engine, file, far - 4096, 8192) == bytes(4096) + b"f" * 4096


async def test_requests_of_nothing_do_nothing(engine: IoEngine, file: int) -> None:
    async with engine.buffers().take() as buffer:
        assert await engine.read(file, buffer, 0, 0) == 0
        assert await engine.write(file, buffer, 0, 0) == 0
        assert await engine.write(file, buffer, 0, 0, sync=True) == 0
    assert os.fstat(file).st_size == 0


async def test_many_requests_at_once_each_get_their_own_bytes(engine: IoEngine, file: int) -> None:
    draw = random.Random(2)
    blocks = [draw.randbytes(4096) for _ in range(20 * DEPTH)]
    order = draw.sample(range(len(blocks)), len(blocks))
    await asyncio.gather(*(put(engine, file, n * 4096, blocks[n]) for n in order))
    await engine.fdatasync(file)
    read = await asyncio.gather(*(get(engine, file, n * 4096, 4096) for n in order))
    assert read == [blocks[n] for n in order]
    assert engine.buffers().free_count == engine.buffers().count


async def test_a_random_history_matches_a_plain_byte_array(engine: IoEngine, file: int) -> None:
    draw = random.Random(3)
    model = bytearray()
    for _ in range(150):
        offset, length = draw.randrange(64) * 4096, draw.randrange(1, 9) * 4096
        if draw.random() < 0.5:
            data = draw.randbytes(length)
            await put(engine, file, offset, data, sync=draw.random() < 0.05)
            model.extend(bytes(max(0, offset + length - len(model))))
            model[offset : offset + length] = data
        else:
            assert await get(engine, file, offset, length) == bytes(model[offset:][:length])


async def test_errors_name_the_file_and_what_was_done(engine: IoEngine, tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.write_bytes(b"r" * 4096)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match=r"write .*/read-only .*at 0\+4096") as caught:
            await put(engine, fd, 0, b"w" * 4096, sync=True)
        assert caught.value.errno == errno.EBADF
        assert await get(engine, fd, 0, 4096) == b"r" * 4096
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="not open") as caught:
        await get(engine, fd, 0, 4096)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="fdatasync") as caught:
        await engine.fdatasync(fd)
    assert caught.value.errno == errno.EBADF


async def test_a_failed_request_leaves_the_engine_usable(engine: IoEngine, file: int) -> None:
    for _ in range(3 * DEPTH):
        with pytest.raises(OSError, match="fdatasync"):
            await engine.fdatasync(1 << 20)
    assert await put(engine, file, 0, b"a" * 4096) == 4096


async def test_a_misaligned_direct_request_is_refused_by_the_kernel(
    engine: IoEngine, tmp_path: Path
) -> None:
    path = tmp_path / "direct"
    path.write_bytes(bytes(8192))
    allowed = probe_direct(tmp_path)[0].allowed
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if allowed else 0))
    try:
        number = None
        try:
            await put(engine, fd, 100, b"m" * 100)
        except OSError as error:
            number = error.errno
        assert number == (errno.EINVAL if allowed else None)
    finally:
        os.close(fd)


async def test_senseless_arguments_are_refused(engine: IoEngine, file: int) -> None:
    async with BufferPool(1).take() as foreign:
        with pytest.raises(ValueError, match="another engine"):
            await engine.read(file, foreign, 0, 1)
    async with engine.buffers().take() as buffer:
        with pytest.raises(ValueError, match="does not fit"):
            await engine.read(file, buffer, 0, BUFFER_BYTES + 1)
        with pytest.raises(ValueError, match="does not fit"):
            await engine.write(file, buffer, 0, -1)
        with pytest.raises(ValueError, match="no file"):
            await engine.read(file, buffer, -4096, 4096)
        with pytest.raises(ValueError, match="no file"):
            await engine.read(file, buffer, 1 << 64, 4096)
    with pytest.raises(ValueError, match="given back"):
        await engine.write(file, buffer, 0, 4096)


async def test_a_cancelled_request_is_over_before_its_caller_is(
    engine: IoEngine, file: int
) -> None:
    """Else the buffer would be lent anew, and the descriptor reused, under the kernel's hands."""

    async def one(number: int) -> None:
        async with engine.buffers().take() as buffer:
            buffer.memory[:4096] = bytes([number]) * 4096
            try:
                await engine.write(file, buffer, number * 4096, 4096, sync=True)
            finally:
                assert buffer.in_flight == 0

    tasks = [asyncio.create_task(one(number)) for number in range(3 * DEPTH)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert engine.buffers().free_count == engine.buffers().count
    # Whatever was let in is whole; whatever was not has left nothing.
    for number in range(3 * DEPTH):
        content = await get(engine, file, number * 4096, 4096)
        assert content in (b"", bytes(4096), bytes([number]) * 4096)


async def test_a_buffer_left_in_flight_is_not_lent_again(engine: IoEngine, file: int) -> None:
    pool = engine.buffers()
    async with pool.take() as buffer:
        buffer.memory[:4096] = b"k" * 4096
        request = asyncio.create_task(engine.write(file, buffer, 0, 4096, sync=True))
        await asyncio.sleep(0)
        assert buffer.in_flight == 1
    assert pool.free_count == pool.count - 1
    assert await request == 4096
    assert pool.free_count == pool.count


async def test_close_waits_for_what_is_in_flight_and_ends_the_engine(
    engine: IoEngine, file: int
) -> None:
    writes = [
        asyncio.create_task(put(engine, file, n * 4096, b"c" * 4096, sync=True))
        for n in range(DEPTH)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.close()
    done = await asyncio.gather(*writes, return_exceptions=True)
    assert all(
        outcome == 4096 or (isinstance(outcome, OSError) and outcome.errno == errno.EBADF)
        for outcome in done
    )
    assert 4096 in done
    await engine.close()
    with pytest.raises(OSError, match="closed") as caught:
        await get(engine, file, 0, 4096)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="closed"):
        await engine.fdatasync(file)


async def test_a_storm_of_cancelled_requests_leaves_nothing_behind(
    engine: IoEngine, file: int
) -> None:
    """Whatever is given up when: everybody else reads what they wrote, every slot is free."""
    draw = random.Random(4)

    async def one(number: int) -> None:
        async with engine.buffers().take() as buffer:
            if draw.random() < 0.2:
                await engine.fdatasync(file)
            pattern = number.to_bytes(4, "big") * 1024
            buffer.memory[:4096] = pattern
            await engine.write(file, buffer, number % 64 * 4096, 4096)
            buffer.memory[:4096] = bytes(4096)
            assert await engine.read(file, buffer, number % 64 * 4096, 4096) == 4096
            assert buffer.memory[:4096] == pattern

    for round_number in range(20):
        tasks = [asyncio.create_task(one(round_number * 64 + number)) for number in range(64)]
        for _ in range(8):
            await asyncio.sleep(0)
            for task in draw.sample(tasks, 6):
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
    assert engine.buffers().free_count == engine.buffers().count
    written = await asyncio.gather(*(put(engine, file, n * 4096, b"z" * 4096) for n in range(64)))
    assert written == [4096] * 64
