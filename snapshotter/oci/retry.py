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


def pause_after(error: EmberError, attempt: int, first_s: float) -> float:
    """Seconds until the next try: twice as many each time, not all clients' the same, and no fewer
    than a busy server asked for."""
    told_s = error.retry_after_s if isinstance(error, BusyError) else None
    own_s: float = first_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
    return max(told_s or 0.0, own_s)


async def retrying(work: Callable[[], Awaitable[T]], clock: Clock, patience: Patience) -> T:
    """The result of ``work``; its last error if it keeps failing or asks for too long a pause."""
    for attempt in range(1, patience.attempts + 1):
        try:
            return await work()
        except EmberError as error:
            pause_s = pause_after(error, attempt, patience.first_pause_s)
            too_long = pause_s > patience.longest_pause_s
            if not error.retryable or attempt == patience.attempts or too_long:
                raise
        await clock.sleep(pause_s)
    raise ValueError("patience without an attempt")
