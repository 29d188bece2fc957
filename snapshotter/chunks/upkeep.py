"""What is done for open views every few seconds: sync, prove what is in doubt, refill the ballast.

Invariant: what goes wrong with one of them keeps none of the others from its turn. A fault that
lasts is logged when it begins and when it is over, not each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from snapshotter.chunks.offload import offload
from snapshotter.chunks.space import Space
from snapshotter.chunks.view import View
from snapshotter.clock import Clock
from snapshotter.errors import EmberError
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)


class Upkeep:
    """Life: ``start``, ``stop``; ``turn`` is one round of it."""

    def __init__(
        self,
        views: Callable[[], list[View]],
        space: Space,
        clock: Clock,
        every_s: float,
        prove_chunks: int,
    ) -> None:
        self._views = views
        self._space = space
        self._clock = clock
        self._every_s = every_s
        self._prove_chunks = prove_chunks
        self._turning = asyncio.Lock()
        self._failing: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the background."""
        self._task = asyncio.create_task(self._run(), name="chunks-upkeep")

    async def stop(self) -> None:
        """End; what is under way is cancelled."""
        await end_all([self._task])
        self._task = None

    async def turn(self) -> None:
        """Everything once."""
        async with self._turning:
            before, self._failing = self._failing, set()
            for view in self._views():
                await self._attempt(f"flushing {view.digest}", view.flush, before)
            for view in self._views():
                if view.unproved():
                    await self._attempt(f"proving {view.digest}", self._proof(view), before)
            await self._attempt("refilling the ballast", self._refill, before)
            for doing in before - self._failing:
                log.warning("%s does not fail any more", doing)

    def _proof(self, view: View) -> Callable[[], Awaitable[object]]:
        return lambda: view.prove(self._prove_chunks)

    async def _refill(self) -> None:
        await offload(None, self._space.refill_ballast)

    async def _attempt(
        self, doing: str, work: Callable[[], Awaitable[object]], before: set[str]
    ) -> None:
        try:
            await work()
        except (EmberError, OSError) as error:
            self._failing.add(doing)
            if doing not in before:
                log.error("%s failed: %s; it is tried again", doing, error)
        except Exception:
            self._failing.add(doing)
            if doing not in before:
                log.exception("%s failed; it is tried again", doing)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._every_s)
            await self.turn()
