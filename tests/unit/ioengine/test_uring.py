"""What must hold of the ring alone: continuation, cancellation, bounds, forks, signals, its end.

A pipe stands for a slow disk: transfers on it are short and wait, which preadv refuses. Where
io_uring is denied nothing here can run; what happens then is test_denied.py's matter.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import signal
import tempfile
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from ioengine.buffers import BufferPool
from ioengine.probe import probe_io_uring
from ioengine.uring import UringEngine

__test__ = probe_io_uring(Path(tempfile.gettempdir())).allowed

DEPTH = 2

Pipe = tuple[int, int]


@pytest.fixture
async def engine() -> AsyncIterator[UringEngine]:
    opened = UringEngine.open(BufferPool(4, 8192), depth=DEPTH, drain_timeout_s=0.05)
    yield opened
    await opened.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield fd
    os.close(fd)


async def read_pipe(engine: UringEngine, pipe: Pipe, length: int) -> bytes:
    async with engine.buffers().take() as buffer:
        count = await engine.read(pipe[0], buffer, 0, length)
        return bytes(buffer.memory[:count])


def fork() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return child


def status(child: int) -> int:
    return os.waitpid(child, 0)[1]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until_drained(pipe: Pipe) -> None:
    """Wait until the ring has taken what was written to ``pipe``."""
    waiting = array.array("i", [1])
    for _ in range(100_000):
        fcntl.ioctl(pipe[0], termios.FIONREAD, waiting)
        if waiting[0] == 0:
            return
        await asyncio.sleep(0)
    raise AssertionError("nobody reads the pipe")


async def test_a_short_read_is_continued_until_it_is_whole(engine: UringEngine, pipe: Pipe) -> None:
    task = asyncio.create_task(read_pipe(engine, pipe, 8))
    for part in (b"abc", b"de"):
        os.write(pipe[1], part)
        await until_drained(pipe)
        await turns()
        assert not task.done()
    os.write(pipe[1], b"fgh")
    assert await task == b"abcdefgh"


async def test_a_cancelled_reader_waits_for_the_kernel(engine: UringEngine, pipe: Pipe) -> None:
    task = asyncio.create_task(read_pipe(engine, pipe, 4))
    await turns()
    task.cancel()
    await turns()
    task.cancel("again")
    await turns()
    assert not task.done()
    assert engine.buffers().free_count == engine.buffers().count - 1
    os.write(pipe[1], b"late")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.buffers().free_count == engine.buffers().count


async def test_a_reader_that_waits_for_room_can_be_cancelled_at_once(
    engine: UringEngine, pipe: Pipe
) -> None:
    inside = [asyncio.create_task(read_pipe(engine, pipe, 1)) for _ in range(DEPTH)]
    await turns()
    outside = asyncio.create_task(read_pipe(engine, pipe, 1))
    await turns()
    outside.cancel()
    await turns()
    assert outside.cancelled()
    os.write(pipe[1], b"ab")
    assert sorted(await asyncio.gather(*inside)) == [b"a", b"b"]


async def test_no_more_than_depth_requests_are_in_flight(engine: UringEngine, pipe: Pipe) -> None:
    tasks = [asyncio.create_task(read_pipe(engine, pipe, 1)) for _ in range(DEPTH + 1)]
    await turns()
    in_flight = engine.buffers().count - engine.buffers().free_count
    assert in_flight == DEPTH + 1  # each holds a buffer, but the last one's is not pinned yet
    os.write(pipe[1], b"abc")
    assert sorted(await asyncio.gather(*tasks)) == [b"a", b"b", b"c"]


async def test_a_disk_that_does_not_answer_fails_close_and_loses_nothing(
    engine: UringEngine, pipe: Pipe
) -> None:
    task = asyncio.create_task(read_pipe(engine, pipe, 5))
    await turns()
    with pytest.raises(TimeoutError, match="1 I/O requests are still in flight") as caught:
        await engine.close()
    assert caught.value.errno == errno.ETIMEDOUT
    os.write(pipe[1], b"awake")
    assert await task == b"awake"
    await engine.close()


async def test_a_number_that_is_no_descriptor_costs_no_slot(engine: UringEngine, file: int) -> None:
    async with engine.buffers().take() as buffer:
        for _ in range(3 * DEPTH):
            with pytest.raises(OverflowError):
                await engine.read(1 << 40, buffer, 0, 1)
            with pytest.raises(OSError, match="Bad file descriptor"):
                await engine.read(-1, buffer, 0, 1)
        assert await engine.write(file, buffer, 0, 4096) == 4096


async def test_a_forked_child_does_not_part_the_kernel_from_our_bytes(
    engine: UringEngine, file: int
) -> None:
    """Copy-on-write after a fork must not leave the pinned pages with the old content."""
    async with engine.buffers().take() as buffer:
        for number in range(8):
            buffer.memory[:] = bytes([number]) * 8192
            child = fork()
            buffer.memory[:] = bytes([number + 100]) * 8192
            await engine.write(file, buffer, 0, 8192)
            assert os.pread(file, 8192, 0) == bytes([number + 100]) * 8192
            os.pwrite(file, b"\xff" * 8192, 0)
            await engine.read(file, buffer, 0, 8192)
            assert buffer.memory == b"\xff" * 8192
            assert status(child) == 0


async def test_signals_do_not_disturb_requests(engine: UringEngine, file: int) -> None:
    rings: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _frame: rings.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        async with engine.buffers().take() as buffer:
            for number in range(200):
                buffer.memory[:4096] = bytes([number]) * 4096
                await engine.write(file, buffer, number * 4096, 4096, sync=number % 50 == 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rings
    assert os.fstat(file).st_size == 200 * 4096
    assert all(os.pread(file, 1, number * 4096)[0] == number for number in range(200))


async def test_two_rings_live_side_by_side(engine: UringEngine, file: int) -> None:
    other = UringEngine.open(BufferPool(1, 4096), depth=1)
    async with engine.buffers().take() as ours, other.buffers().take() as theirs:
        ours.memory[:4] = b"ring"
        await engine.write(file, ours, 0, 4)
        assert await other.read(file, theirs, 0, 4) == 4
        assert bytes(theirs.memory[:4]) == b"ring"
    await other.close()


def test_the_ring_works_under_uvloop(file: int) -> None:
    async def scenario() -> bytes:
        engine = UringEngine.open(BufferPool(8, 4096), depth=4)

        async def write(number: int) -> None:
            async with engine.buffers().take() as buffer:
                buffer.memory[:] = bytes([number]) * 4096
                await engine.write(file, buffer, number * 4096, 4096)

        await asyncio.gather(*(write(number) for number in range(64)))
        await engine.fdatasync(file)
        await engine.close()
        return os.pread(file, 64 * 4096, 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        content = runner.run(scenario())
    assert content == b"".join(bytes([number]) * 4096 for number in range(64))
