"""Blocking work in a bounded pool of threads, for callers that may be cancelled meanwhile.

Invariant: when the call ends, however it ends, the thread is done with what it was given; a buffer
can be lent to the next user without being written by the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def offload(
    pool: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run ``work`` in ``pool`` (None: the loop's own) and return what it returns.

    A cancelled caller gets its CancelledError after the work is over.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(pool, lambda: work(*args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await over(future)
        raise
    finally:
        del future  # its error, if there is one, has come through this frame


async def over(future: asyncio.Future[T]) -> None:
    """Return when ``future`` is done, even if cancelled meanwhile; its error is marked as seen."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()
