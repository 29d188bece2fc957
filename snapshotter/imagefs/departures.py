"""Images that were removed while something stood on them: they go when the last of it has gone.

The wish is kept with the image's record, so a restart does not lose it. It is dropped when
containerd has the image again, for then somebody wants it. Of images that containerd has removed a
bounded number stays known: then the one that was pulled longest ago goes, index and all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import EmberError
from snapshotter.imagefs.catalog import Catalog, Image
from snapshotter.imagefs.removal import Outcome
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Snapshots go one after the other, and the kernel needs a moment to let go of a mount."""
LOOK_S = 60.0
IMAGES_KEPT = 4096
AT_ONCE = 32
"""So many more are looked at in one look: nobody waits for them to go."""


class Removals(Protocol):
    """Removes images (removal.Remover)."""

    async def remove(self, image: Image, *, data_only: bool) -> Outcome:
        """Whether something of it is in use still, the outcome says."""
        ...


class Departures:
    """Life story: ``start``, ``wake`` whenever a snapshot of a layer has gone, ``stop``."""

    def __init__(
        self,
        catalog: Catalog,
        remover: Removals,
        held: Callable[[], Awaitable[Collection[str]]],
        gone: Callable[[Digest], None],
        clock: Clock,
        images_kept: int = IMAGES_KEPT,
    ) -> None:
        """``held``: the names of all images that containerd has, in any namespace."""
        self._catalog = catalog
        self._remover = remover
        self._held = held
        self._gone = gone
        self._clock = clock
        self._images_kept = images_kept
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what could go since the last daemon looked."""
        self._awake.set()
        self._task = asyncio.create_task(self._run(), name="departures")

    def wake(self) -> None:
        """Something may be free to go now."""
        self._awake.set()

    async def stop(self) -> None:
        """Stop; what has not gone goes under the next daemon."""
        await end_all([self._task])

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._awake.wait()
            if self._awake.is_set():
                self._awake.clear()
                await self._clock.sleep(SETTLE_S)
            for image in self._catalog.images():
                if image.leaving:
                    await self._try(image)
            if len(self._catalog.images()) > self._images_kept:
                await self._thin_out()

    async def _try(self, image: Image) -> None:
        name = image.names[0] if image.names else str(image.manifest)
        try:
            if not set(image.names).isdisjoint(await self._held()):
                await self._catalog.stay(image.manifest)
                log.info("%s was pulled again: it is not removed any more", name)
                return
            outcome = await self._remover.remove(image, data_only=False)
        except EmberError as error:
            log.warning("removing %s, as was asked for before: %s; tried again", name, error)
        except Exception:
            log.exception("removing %s, as was asked for before, failed; tried again", name)
        else:
            if not outcome.in_use:
                self._gone(image.manifest)
                log.info("%s is removed, as was asked for: nothing stands on it any more", name)

    async def _thin_out(self) -> None:
        """Forget images that containerd does not have any more and nothing stands on."""
        try:
            held = await self._held()
            oldest_first = [
                image
                for image in reversed(self._catalog.images())
                if not image.leaving and set(image.names).isdisjoint(held)
            ]
            surplus = max(0, len(self._catalog.images()) - self._images_kept)
        except EmberError as error:
            log.warning("images that nobody has any more are not forgotten yet: %s", error)
            return
        for image in oldest_first[: min(surplus, AT_ONCE)]:
            try:
                gone = not (await self._remover.remove(image, data_only=False)).in_use
            except Exception:
                log.exception("forgetting %s failed; others come first now", image.manifest)
                gone = False
            if gone:
                self._gone(image.manifest)
            else:
                await self._catalog.touch(image.manifest, self._clock.wall_ns())
