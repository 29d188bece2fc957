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


async def test_no_more_threads_than_workers_are_started(file: int) -> None:
    engine = ThreadEngine.open(BufferPool(8, 4096), workers=2, depth=8)
    await asyncio.gather(*(engine.fdatasync(file) for _ in range(32)))
    names = [thread.name for thread in threading.enumerate()]
    assert 1 <= sum(name.startswith("ember-io") for name in names) <= 2
    await engine.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("ember-io") for name in names)
