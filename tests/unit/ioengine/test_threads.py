"""What must hold of the thread engine alone: its threads finish what their callers gave up."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield fd
    os.close(fd)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_cancelled_writer_waits_for_its_thread(file: int) -> None:
    held = threading.Event()
    executor = ThreadPoolExecutor(1)
    engine = ThreadEngine.open(BufferPool(1, 4096), executor=executor)
    executor.submit(held.wait)

    async def write() -> None:
        async with engine.buffers().take() as buffer:
            buffer.memory[:4] = b"kept"
            await engine.write(file, buffer, 0, 4)

    task = asyncio.create_task(write())
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    assert engine.buffers().free_count == 0
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.pread(file, 4, 0) == b"kept"
    await engine.close()


async def test_a_disk_that_does_not_answer_fails_close(file: int) -> None:
    held = threading.Event()
    executor = ThreadPoolExecutor(1)
    engine = ThreadEngine.open(BufferPool(1, 4096), executor=executor, drain_timeout_s=0.05)
    executor.submit(held.wait)
    sync = asyncio.create_task(engine.fdatasync(file))
    await turns()
    with pytest.raises(TimeoutError, match="still in flight") as caught:
        await engine.close()
    assert caught.value.errno == errno.ETIMEDOUT
    held.set()
    await sync
    await engine.close()
    with pytest.raises(OSError, match="closed"):
        await engine.fdatasync(file)


def io_threads() -> int:
    return sum(thread.name.startswith("ember-io") for thread in threading.enumerate())


async def test_all_threads_are_there_from_the_start_and_gone_at_the_end(file: int) -> None:
    engine = ThreadEngine.open(BufferPool(8, 4096), workers=3, depth=8)
    assert io_threads() == 3
    await asyncio.gather(*(engine.fdatasync(file) for _ in range(32)))
    assert io_threads() == 3
    await engine.close()
    assert io_threads() == 0


async def test_threads_that_cannot_be_had_are_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if io_threads() == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(OSError, match="can't start 4 threads") as caught:
        ThreadEngine.open(BufferPool(1, 4096), workers=4)
    assert caught.value.errno == errno.EAGAIN
    assert io_threads() == 0
