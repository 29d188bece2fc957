"""Trying again, a few times and with growing pauses, what may work a moment later."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from snapshotter.clock import Clock
from snapshotter.errors import BusyError, EmberError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """``attempts`` in all; the first pause, doubled each time; the longest pause that is borne."""

    attempts: int = 3
    first_pause_s: float = 0.3
    longest_pause_s: float = 5.0


async def retrying(work: Callable[[], Awaitable[T]], clock: Clock, patience: Patience) -> T:
    """The result of ``work``; its last error if it keeps failing or asks for too long a pause."""
    for attempt in range(1, patience.attempts + 1):
        try:
            return await work()
        except EmberError as error:
            told_s = error.retry_after_s if isinstance(error, BusyError) else None
            pause_s = patience.first_pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            pause_s = max(pause_s, told_s or 0.0)
            too_long = pause_s > patience.longest_pause_s
            if not error.retryable or attempt == patience.attempts or too_long:
                raise
        await clock.sleep(pause_s)
    raise ValueError("patience without an attempt")
