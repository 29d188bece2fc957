"""Several pieces of work at once, so many and no more; the first fault ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def together(works: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """The results of ``works`` in their order.

    When this returns or raises (the first error, or that it was cancelled), none is running.
    """
    turn = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Awaitable[T]]) -> T:
        async with turn:
            return await work()

    tasks = [asyncio.ensure_future(one(work)) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
