"""A clock whose sleeps take no time: they are recorded, and time jumps ahead instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from snapshotter.clock import Timer


class SkippingClock:
    """Starts at ``now_s`` both on the wall and monotonic."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s
        self.slept: list[float] = []

    def wall_ns(self) -> int:
        return int(self.now_s * 1e9)

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now_s += duration_s
        await asyncio.sleep(0)

    def call_later(self, after_s: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(after_s, callback)
