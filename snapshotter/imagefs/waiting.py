"""Which reads wait just now, for how long and why: an operator shall not need to guess.

A read that waits long is named in the log while it still waits, once for each view and period, so
that a registry that is gone does not fill the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from snapshotter.clock import Clock
from snapshotter.content import Digest, Extent
from snapshotter.metrics import Metrics

log = logging.getLogger(__name__)

LONG_S = 10.0
AGAIN_S = 60.0
_LINES = 32


@dataclass(frozen=True, slots=True)
class Waiting:
    """The reads of one view that wait: how many, since when the oldest, for what, and why."""

    view: Digest
    count: int
    longest_s: float
    extent: Extent
    why: str


class WaitingReads:
    """Event loop only. Life: ``during`` around each read's wait; ``close`` in the end.

    ``why`` says why what a view's readers wait for is not here yet, by tier.
    """

    def __init__(self, clock: Clock, why: Callable[[Digest], str]) -> None:
        self._clock = clock
        self._why = why
        self._serial = itertools.count()
        self._reads: dict[int, tuple[Digest, Extent, float]] = {}
        self._named: dict[Digest, float] = {}
        self._watch: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def during(self, view: Digest, extent: Extent) -> Iterator[None]:
        """A reader of ``extent`` waits for as long as the block lasts."""
        number = next(self._serial)
        self._reads[number] = (view, extent, self._clock.monotonic_s())
        if self._watch is None:
            self._watch = asyncio.create_task(self._look(), name="waiting reads")
        try:
            yield
        finally:
            del self._reads[number]

    def now(self) -> list[Waiting]:
        """Those who wait, the longest first; one entry for each view."""
        oldest: dict[Digest, tuple[Extent, float]] = {}
        counts: dict[Digest, int] = {}
        for view, extent, since_s in self._reads.values():  # in order of their coming
            oldest.setdefault(view, (extent, since_s))
            counts[view] = counts.get(view, 0) + 1
        now_s = self._clock.monotonic_s()
        found = [
            Waiting(view, counts[view], now_s - since_s, extent, self._why(view))
            for view, (extent, since_s) in oldest.items()
        ]
        return sorted(found, key=lambda one: -one.longest_s)

    def publish(self, metrics: Metrics) -> None:
        """Let the gauges show what waits; they are asked from another thread."""
        metrics.reads_waiting.set_function(lambda: len(self._reads))
        metrics.longest_wait_s.set_function(self._longest_s)

    def _longest_s(self) -> float:
        oldest = list(self._reads.values())[:1]  # in one step, whatever the loop does meanwhile
        return self._clock.monotonic_s() - oldest[0][2] if oldest else 0.0

    def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.cancel()

    async def _look(self) -> None:
        while self._reads:
            await self._clock.sleep(LONG_S / 2)
            now_s = self._clock.monotonic_s()
            self._named = {v: at_s for v, at_s in self._named.items() if now_s - at_s < AGAIN_S}
            late = [one for one in self.now() if one.longest_s >= LONG_S]
            for one in [one for one in late if one.view not in self._named][:_LINES]:
                self._named[one.view] = now_s
                log.warning(
                    "readers of view %s wait (%d of them, the longest for %.0f s, for bytes %d to"
                    " %d): %s",
                    one.view,
                    one.count,
                    one.longest_s,
                    one.extent.offset,
                    one.extent.end,
                    one.why,
                )
        self._watch = None
