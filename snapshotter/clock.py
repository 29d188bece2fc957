"""Time as a dependency: the daemon gets the system's, tests get one that they turn by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """It shall not; harmless when it has come."""
        ...


class Clock(Protocol):
    """Wall time for records, monotonic time for durations, a sleep and a timer that follow it."""

    def wall_ns(self) -> int:
        """Nanoseconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after ``duration_s`` seconds of monotonic time."""
        ...

    def call_later(self, after_s: float, callback: Callable[[], object]) -> Timer:
        """Call ``callback`` on the running loop after so many seconds, unless it is cancelled.

        For what is nearly always over before: it costs no task.
        """
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def call_later(self, after_s: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(after_s, callback)
