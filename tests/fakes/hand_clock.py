"""A clock that stands still until a test turns it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from snapshotter.clock import Timer


class _HandTimer:
    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def cancel(self) -> None:
        self._future.cancel()


class HandClock:
    """Sleepers wake in order of their time, when advance() comes past it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    @property
    def sleepers(self) -> int:
        """How many sleep now."""
        return sum(not future.done() for _, _, future in self._sleepers)

    def wall_ns(self) -> int:
        return int(self.now_s * 1e9)

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + duration_s, next(self._order), future))
        await future

    def call_later(self, after_s: float, callback: Callable[[], object]) -> Timer:
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda future: future.cancelled() or callback())
        heapq.heappush(self._sleepers, (self.now_s + max(0.0, after_s), next(self._order), future))
        return _HandTimer(future)

    async def advance(self, duration_s: float) -> None:
        """Let ``duration_s`` pass, waking each sleeper at its time."""
        end_s = self.now_s + duration_s
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self.now_s, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await asyncio.sleep(0)
        self.now_s = end_s
        await asyncio.sleep(0)
