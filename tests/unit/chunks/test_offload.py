"""Work in a thread: its result or its error comes back, and nobody goes on before it is over."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from snapshotter.chunks.offload import offload


@pytest.mark.parametrize("own_pool", [True, False])
async def test_results_and_errors_come_back(own_pool: bool) -> None:
    pool = ThreadPoolExecutor(1) if own_pool else None
    assert await offload(pool, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await offload(pool, divmod, 7, 0)
    if pool is not None:
        pool.shutdown()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_cancelled_caller_goes_on_when_the_work_is_over(fails: bool) -> None:
    go_on, over = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(10)
        over.set()
        if fails:
            raise ValueError("lost")

    with ThreadPoolExecutor(1) as pool:
        task = asyncio.create_task(offload(pool, work))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert over.is_set()
