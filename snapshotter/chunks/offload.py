"""Blocking work in a bounded pool of threads, for callers that may be cancelled meanwhile.

Invariant: when the call ends, however it ends, the thread is done with what it was given; a buffer
can be lent to the next user without being written by the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Errand(Generic[T]):
    """One piece of work: the thread runs it, and the loop hears of its end in one turn."""

    __slots__ = ("_loop", "_work", "error", "is_over", "result", "told")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> None:
        self._loop = loop
        self._work = work
        self.told: asyncio.Future[None] = loop.create_future()
        self.is_over = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # the caller's to see, whatever it is
            self.error = error
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.is_over = True
        if not self.told.done():
            self.told.set_result(None)


async def offload(
    pool: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run ``work`` in ``pool`` (None: the loop's own) and return what it returns.

    A cancelled caller gets its CancelledError after the work is over.
    """
    loop = asyncio.get_running_loop()
    errand = _Errand(loop, lambda: work(*args, **kwargs))
    if pool is None:
        loop.run_in_executor(None, errand.run)
    else:
        pool.submit(errand.run)
    error: BaseException | None = None
    try:
        while not errand.is_over:
            try:
                await errand.told
            except asyncio.CancelledError as cancelled:
                error = cancelled
                errand.told = loop.create_future()
        failure, errand.error = errand.error, None
        error = error or failure
        if error is not None:
            raise error
        return cast(T, errand.result)
    finally:
        error = failure = None  # it has come through this frame, which must not know it


async def over(future: asyncio.Future[T]) -> None:
    """Return when ``future`` is done, even if cancelled meanwhile; its error is marked as seen."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()
