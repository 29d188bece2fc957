"""One piece of work for all who ask for the same thing at the same time.

The work is a task of its own: a caller that is cancelled leaves it running for the others, and it
is cancelled only when the last of them has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


class Flights(Generic[T]):
    """Joins calls by key. Results are not kept: who comes later starts anew."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    async def join(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, or of the same work under way."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_run(work)))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                flight.task.cancel()
                self._landed(key, flight.task)
            del flight  # the task's error, if there is one, has come through this frame

    def _landed(self, key: Hashable, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if task.done() and not task.cancelled():
            task.exception()


async def _run(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
