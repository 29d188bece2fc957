"""The ends of many waits, kept by one sleeper: a wait that is served in time costs no timer.

Event loop only. It sleeps only while some wait has an end, and knows nothing of what is waited for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from snapshotter.clock import Clock

_SPARE = 64
"""So many ends of waits that are over may lie about."""


class Deadline:
    """The end of one wait."""

    __slots__ = ("_ends", "expire")

    def __init__(self, ends: Deadlines, expire: Callable[[], None]) -> None:
        self._ends = ends
        self.expire: Callable[[], None] | None = expire

    def cancel(self) -> None:
        """The wait is over; harmless when its end has come."""
        if self.expire is not None:
            self.expire = None
            self._ends.dropped()


class Deadlines:
    """See above."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Deadline]] = []
        self._dead = 0
        self._sleeper: asyncio.Task[None] | None = None
        self._wakes_s = 0.0

    def add(self, after_s: float, expire: Callable[[], None]) -> Deadline:
        """Call ``expire`` after ``after_s`` seconds, unless it is cancelled before."""
        deadline = Deadline(self, expire)
        at_s = self._clock.monotonic_s() + max(0.0, after_s)
        heapq.heappush(self._heap, (at_s, next(self._order), deadline))
        if self._sleeper is not None and at_s < self._wakes_s:
            self._sleeper.cancel()
            self._sleeper = None
        if self._sleeper is None:
            self._wakes_s = at_s
            self._sleeper = asyncio.create_task(self._watch(at_s), name="deadlines")
        return deadline

    def dropped(self) -> None:
        """One more was cancelled: they are taken out when they are many."""
        self._dead += 1
        if self._dead > _SPARE and 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].expire is not None]
            heapq.heapify(self._heap)
            self._dead = 0

    def close(self) -> None:
        """Nothing expires any more."""
        self._heap.clear()
        if self._sleeper is not None:
            self._sleeper.cancel()
            self._sleeper = None

    async def _watch(self, at_s: float) -> None:
        while True:
            await self._clock.sleep(at_s - self._clock.monotonic_s())
            now_s = self._clock.monotonic_s()
            while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].expire is None):
                deadline = heapq.heappop(self._heap)[2]
                expire, deadline.expire = deadline.expire, None
                if expire is None:
                    self._dead -= 1
                else:
                    expire()
            if not self._heap:
                self._sleeper = None
                return
            at_s = self._wakes_s = self._heap[0][0]
