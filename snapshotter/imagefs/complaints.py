"""The lines of the log about reads that failed: file, range and reason of each.

Invariant: no failed read is left out. A storm's first lines are written one by one, the others are
summed up per file when the moment is over, so that a lost registry does not fill the disk.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from snapshotter.clock import Clock
from snapshotter.content import Extent

log = logging.getLogger(__name__)

MOMENT_S = 5.0
LINES_EACH_MOMENT = 32
_MOST_FILES = 256


@dataclass(slots=True)
class _Sum:
    """Reads of one file (None: of those beyond the bound) that got no line of their own."""

    count: int
    start: int
    end: int
    why: str


class Complaints:
    """Event loop only. Life: ``add`` at any time; ``close`` writes what is still held back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines = 0
        self._sums: dict[str | None, _Sum] = {}
        self._moment: asyncio.Task[None] | None = None

    def add(self, file: str, extent: Extent, why: str) -> None:
        """A reader of ``extent`` of ``file``, as a line names it, gets an error."""
        if self._moment is None:
            self._moment = asyncio.create_task(self._pass(), name="failed reads")
        if self._lines < LINES_EACH_MOMENT:
            self._lines += 1
            log.error(
                "a reader of %s gets an error for bytes %d to %d: %s",
                file,
                extent.offset,
                extent.end,
                why,
            )
            return
        key = file if file in self._sums or len(self._sums) < _MOST_FILES else None
        known = self._sums.get(key)
        if known is None:
            self._sums[key] = _Sum(1, extent.offset, extent.end, why)
            return
        known.count += 1
        known.start = min(known.start, extent.offset)
        known.end = max(known.end, extent.end)
        known.why = why

    def close(self) -> None:
        """Write what was held back."""
        if self._moment is not None:
            self._moment.cancel()
        self._over()

    async def _pass(self) -> None:
        await self._clock.sleep(MOMENT_S)
        self._over()

    def _over(self) -> None:
        self._moment, self._lines = None, 0
        sums, self._sums = self._sums, {}
        for file, one in sums.items():
            log.error(
                "%d more readers of %s got errors within %g s, for bytes between %d and %d;"
                " the last: %s",
                one.count,
                file or "other files",
                MOMENT_S,
                one.start,
                one.end,
                one.why,
            )
