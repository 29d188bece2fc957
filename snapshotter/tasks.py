"""Several tasks as one: at once but so many and no more, and an end that leaves none running.

It knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def end_all(tasks: Iterable[asyncio.Future[Any] | None]) -> None:
    """Cancel ``tasks`` and wait until they are over, however they end; None is no task."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


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
        await end_all(tasks)
