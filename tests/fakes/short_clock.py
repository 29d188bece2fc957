"""A clock whose pauses take a tenth of their time, so that what happens keeps its order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from snapshotter.clock import Timer


class ShortClock:
    """Real time, but for the pauses."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s / 10)

    def call_later(self, after_s: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(after_s, callback)
