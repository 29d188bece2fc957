"""Fetching the rest of what is mounted: slowly, one view at a time, behind everything else.

Registries collect garbage and credentials expire, so what a node runs should come to be here. It
sleeps until something is mounted, and begins again where it was after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import EmberError
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

RETRY_S = 300.0


def _nobody(view: Digest) -> None:
    """Nobody wants to know."""


class Road(Protocol):
    """The background's way to the road (fetch.py)."""

    async def complete(self, view: Digest, bytes_per_s: int | None = None) -> None: ...


class Completion:
    """Life story: ``start``, ``wake`` whenever a layer was mounted, ``stop``."""

    def __init__(
        self,
        road: Road,
        incomplete: Callable[[], Sequence[Digest]],
        clock: Clock,
        delay_s: float,
        bytes_per_s: int | None,
    ) -> None:
        self._road = road
        self._incomplete = incomplete
        self._clock = clock
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._retry: asyncio.Task[None] | None = None
        self.current: Digest | None = None
        self.when_stuck: Callable[[Digest], object] = _nobody

    def start(self) -> None:
        """Begin; what an earlier daemon left incomplete is taken up first."""
        self._awake.set()
        self._task = asyncio.create_task(self._run(), name="completion")

    def wake(self) -> None:
        """Something was mounted."""
        self._awake.set()

    async def stop(self) -> None:
        """Stop in the middle; nothing that has arrived is lost."""
        await end_all((self._task, self._retry))

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            await self._clock.sleep(self._delay_s)
            if self._retry is not None:
                self._retry.cancel()
            if await self._round():
                self._retry = asyncio.create_task(self._wake_later(), name="completion, again")

    async def _wake_later(self) -> None:
        await self._clock.sleep(RETRY_S)
        self._awake.set()

    async def _round(self) -> bool:
        """Try once to complete each view; True if one could not be."""
        tried: set[Digest] = set()
        while views := [view for view in self._incomplete() if view not in tried]:
            self.current = views[0]
            tried.add(views[0])
            try:
                await self._road.complete(views[0], self._bytes_per_s)
            except EmberError as error:
                log.warning("view %s can't be completed yet: %s", views[0], error)
                self.when_stuck(views[0])
            except Exception:
                log.exception("completing view %s failed", views[0])
            finally:
                self.current = None
        return not tried.isdisjoint(self._incomplete())
