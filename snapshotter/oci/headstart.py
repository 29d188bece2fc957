"""Several ways to one small thing, each with a head start over the next.

A way that fails is followed by the next at once. One that is only slow goes on beside the next, so
that neither a silent place nor a slow one decides how long it takes. The first success ends all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from snapshotter.errors import EmberError
from snapshotter.tasks import end_all

T = TypeVar("T")


async def first_success(
    ways: Sequence[Callable[[], Awaitable[T]]],
    failed: Callable[[int, EmberError], None],
    head_start_s: float,
) -> list[T]:
    """What the first way to succeed gives; empty if none does. ``failed`` is told of each failure
    by the way's number; any other error than EmberError ends it."""
    running: dict[asyncio.Future[T], int] = {}
    try:
        for number, way in enumerate(ways):
            task = asyncio.ensure_future(way())
            running[task] = number
            last = number == len(ways) - 1
            while running and (last or task in running):
                wait_s = None if last else head_start_s
                done, _ = await asyncio.wait(
                    running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for ended in done:
                    error = ended.exception()
                    if error is None:
                        return [ended.result()]
                    if not isinstance(error, EmberError):
                        raise error
                    failed(running.pop(ended), error)
        return []
    finally:
        await end_all(running)
