"""Reads that wait in the kernel because no descriptor is left to take their questions with.

Each question is a descriptor of this process. While others wait theirs come free again; where none
waits and still none can be taken, readers hang beyond every time limit and nobody knows of them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Protocol

from ioengine.guard import GuardCounts
from snapshotter.clock import Clock
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

LOOK_S = 10.0


class Guard(Protocol):
    """The guard (ioengine.guard)."""

    def counts(self) -> GuardCounts: ...


class Starvation:
    """Life story: ``start``, ``stop``."""

    def __init__(self, guard: Guard, clock: Clock) -> None:
        self._guard = guard
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look every few seconds, in the background."""
        self._task = asyncio.create_task(self._run(), name="starved guard")

    async def stop(self) -> None:
        """Look no more."""
        await end_all([self._task])

    async def _run(self) -> None:
        before, told = self._guard.counts(), False
        while True:
            await self._clock.sleep(LOOK_S)
            now = self._guard.counts()
            stuck = now.outstanding == 0 and now.events == before.events
            if not stuck:
                told = False
            elif now.pauses > before.pauses and not told:
                told = True
                log.error(
                    "reads of what is not here wait, but no descriptor is left to take them up"
                    " with: LimitNOFILE is %d, the unit sets more",
                    resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                )
            before = now
