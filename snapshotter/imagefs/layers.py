"""The provider of lazy layers: decision, first pull and mounts behind the snapshotter's protocol.

It never calls back into the snapshotter. Waiting for a first pull happens in ``mount`` with the
caller's limit; everything else here is local and quick.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import NotFoundError, RefusedError, UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import Catalog, Layer
from snapshotter.imagefs.decision import Decider
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.ingest_job import Job
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views
from snapshotter.snapshots.lazy import LayerClaim, LazyLayer, StackEntry
from snapshotter.snapshots.model import Usage

log = logging.getLogger(__name__)


def _nothing() -> None:
    """Nobody wants to know."""


class Others(Protocol):
    """Indexes that others made (foreign.py)."""

    async def renew(self, layers: Sequence[Layer]) -> dict[Layer, str]:
        """What is here of the layers' views by indexes that count for them no more, and why not,
        once it was asked within a budget whether somebody trusted vouches for the same."""
        ...

    async def discard(self, doubtful: dict[Layer, str]) -> str | None:
        """Have these go, with what they brought; why they stay."""
        ...


class Layers:
    """Implements snapshots.lazy.LazyLayers over the parts of this package."""

    def __init__(
        self,
        decider: Decider,
        catalog: Catalog,
        shelf: Shelf,
        ingest: Ingest,
        mounts: LayerMounts,
        views: Views,
        others: Others,
        clock: Clock,
    ) -> None:
        self._decider = decider
        self._catalog = catalog
        self._shelf = shelf
        self._ingest = ingest
        self._mounts = mounts
        self._views = views
        self._others = others
        self._clock = clock
        self.when_mounted: Callable[[], None] = _nothing
        self.when_released: Callable[[], None] = _nothing

    async def claim(self, claim: LayerClaim) -> LazyLayer | None:
        """Take the layer if its whole image is lazy and it is the layer that its labels say."""
        decision = await self._decider.decide(claim)
        if not decision.lazy:
            return None
        for layer in decision.layers:
            if layer.blob == claim.layer_digest and str(layer.chain_id) == claim.chain_id:
                return LazyLayer(layer.blob, layer.diff_id)
        log.warning(
            "%s: layer %s with chain %s is not in its manifest; left to containerd",
            claim.image_ref,
            claim.layer_digest,
            claim.chain_id,
        )
        return None

    def is_fit(self, layer: Digest, view: Digest) -> bool:
        """False for a layer that was refused."""
        return self._catalog.fault(layer, view) is None

    async def mount(self, stack: Sequence[StackEntry], wait_s: float) -> None:
        """Mount every lazy entry, lowest first; UnavailableError if an index comes too late."""
        deadline_s = self._clock.monotonic_s() + wait_s
        below: list[tuple[StackEntry, str]] = []
        await self._without_doubt(stack)
        for entry in stack:
            if entry.layer is not None and self._known(entry) is None:
                self._job(entry)
        for entry in stack:
            key = ""
            if entry.layer is not None:
                index = await self._index(entry, deadline_s)
                key = await self._mounts.mount(entry, index, below)
            below.append((entry, key))
        self.when_mounted()

    async def _without_doubt(self, stack: Sequence[StackEntry]) -> None:
        """An index that counts no more leads to no new mount, nor do the bytes that it let in.

        What containers see of the layer stays until the last has gone, and is what is shown.
        """
        layers = [
            Layer(entry.layer, entry.view, entry.view, 0)
            for entry in stack
            if entry.layer is not None and entry.view is not None
        ]
        found = await self._others.renew(layers)
        for layer in dict.fromkeys(layers):
            doubts = {each: why for each, why in found.items() if each.diff_id == layer.diff_id}
            if not doubts or await self._is_seen(layer):
                continue
            kept = await self._others.discard(doubts)
            if kept is not None:
                raise UnavailableError(kept)
            log.warning("layer %s is brought anew: %s", layer.blob, "; ".join(doubts.values()))

    async def _is_seen(self, layer: Layer) -> bool:
        mounted = self._mounts.of_view(layer.diff_id)
        if not any(each.layer == layer.blob and not each.suspect for each in mounted):
            return False
        return await self._mounts.stood_on(layer.diff_id)

    def _known(self, entry: StackEntry) -> LayerIndex | None:
        """The entry's index, if it is here and of the view that the entry must show."""
        assert entry.layer is not None
        index = self._shelf.get(entry.layer)
        if index is not None and entry.view not in (None, index.diff_id):
            raise RefusedError(
                f"layer {entry.layer} unpacks to {index.diff_id}, but its image promised"
                f" {entry.view}"
            )
        return index

    async def _index(self, entry: StackEntry, deadline_s: float) -> LayerIndex:
        index = self._known(entry)
        if index is not None:
            return index
        job = self._job(entry)
        left_s = max(0.0, deadline_s - self._clock.monotonic_s())
        if not await self._ingest.wait(job, left_s):
            raise UnavailableError(self._progress(job))
        index = self._known(entry)
        if index is None:
            raise UnavailableError(f"the index of layer {entry.layer} is gone; try again")
        return index

    def _job(self, entry: StackEntry) -> Job:
        """The first pull of the entry's layer: the one under way, or a new one."""
        layer, view = entry.layer, entry.view
        origins = self._catalog.origins(layer) if layer is not None else []
        if layer is None or view is None or not origins:
            raise NotFoundError(
                f"no origin is known for layer {layer}; remove the image and pull it again"
            )
        job = self._ingest.job(layer, view)
        if job is not None and not job.finished.is_set():
            return job
        fault = self._catalog.fault(layer, view)
        if fault is not None:
            raise RefusedError(
                f"refused: {fault}; remove the image and pull it again to have containerd"
                " unpack it, if that takes it"
            )
        return self._ingest.start(origins[0], view)

    def _progress(self, job: Job) -> str:
        others = len(self._ingest.jobs()) - 1
        return (
            f"layer {job.blob.digest} is still being indexed: {job.percent} % of"
            f" {job.blob.size_bytes / 1e6:.0f} MB, and {others} other layers are on their way;"
            " `ember status` shows the progress"
        )

    async def release(self, entry: StackEntry) -> None:
        """Unmount the instance that only this snapshot needed."""
        if entry.layer is not None:
            await self._mounts.release(entry.directory)
            self.when_released()

    async def usage(self, entry: StackEntry) -> Usage:
        """Allocated bytes of the view; of inodes there is one: the view file."""
        if entry.view is None:
            return Usage(0, 0)
        return Usage(self._views.bytes_on_disk(entry.view), 1)
