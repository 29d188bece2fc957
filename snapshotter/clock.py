"""Time as a dependency: the daemon gets the system's, tests get one that they turn by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations, and a sleep that follows the latter."""

    def wall_ns(self) -> int:
        """Nanoseconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after ``duration_s`` seconds of monotonic time."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
