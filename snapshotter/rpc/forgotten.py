"""Images that containerd believes to be unpacked here, and of which this cache knows nothing.

That is so after the database was lost. containerd answers for such a layer by itself and never asks
Ember: a pull says that all is well, and no container starts. Nothing but removing the image from
containerd helps, so it is said loudly, and until it is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from snapshotter.clock import Clock
from snapshotter.errors import EmberError
from snapshotter.rpc.containerd import Containerd
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

UNANSWERED_S = 5.0
AGAIN_S = 30.0


class Forgotten:
    """Life story: ``start``, ``stop``. ``note`` is for the operator; empty if all is well."""

    def __init__(
        self,
        containerd: Containerd,
        snapshotter: str,
        chain_ids: Callable[[], Awaitable[Collection[str]]],
        clock: Clock,
    ) -> None:
        """``chain_ids``: those of the committed snapshots that this cache has."""
        self.note = ""
        self._containerd = containerd
        self._snapshotter = snapshotter
        self._chain_ids = chain_ids
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look in the background, as soon as containerd answers."""
        self._task = asyncio.create_task(self._run(), name="forgotten images")

    async def stop(self) -> None:
        """Look no more."""
        await end_all([self._task])

    async def _run(self) -> None:
        while True:
            pause_s = AGAIN_S
            try:
                lost = await self._lost()
            except EmberError as error:
                log.debug("containerd is asked later what it believes to be here: %s", error)
                pause_s = UNANSWERED_S
            except Exception:
                log.exception("asking containerd what it believes to be here failed")
            else:
                if not lost:
                    if self.note:
                        log.warning("what containerd believes to be here is here again")
                    self.note = ""
                    return
                self._tell(lost)
            await self._clock.sleep(pause_s)

    async def _lost(self) -> dict[str, int]:
        """By namespace: how many images are believed to be here and are not."""
        lost = {}
        for namespace in await self._containerd.namespaces():
            believed = await self._containerd.unpacked(namespace, self._snapshotter)
            if believed:
                missing = believed - set(await self._chain_ids())
                lost[namespace] = len(missing)
        return {namespace: count for namespace, count in lost.items() if count}

    def _tell(self, lost: dict[str, int]) -> None:
        where = ", ".join(f"{count} in {namespace}" for namespace, count in lost.items())
        note = (
            f"containerd believes images to be here that this cache knows nothing of ({where}):"
            " containers of them can't start, and pulling them again changes nothing. Remove their"
            " containers, then the images (`crictl rmi`, or `ctr -n NAMESPACE images rm --sync`),"
            " then pull them"
        )
        if note != self.note:
            log.critical("%s", note)
        self.note = note
