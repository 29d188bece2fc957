"""Indexes that nobody vouches for are derived again as soon as their layer is complete.

One at a time, in a process that takes only what others leave; what is not compared yet is found
again after a restart. Where an index was right it is as good as built here. Where it was not, it is
said aloud, its artifact is never used again, its layer is left to containerd, and whoever starts
anew gets another mount or none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from snapshotter.chunks.offload import offload
from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError, RefusedError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import Catalog, Layer
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.mounted import Mounted
from snapshotter.imagefs.provenance import PROVENANCE_SUFFIX, Origin, Provenance, read_provenance
from snapshotter.imagefs.rederive import Verdict
from snapshotter.imagefs.rederiving import compare_apart
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.trust import Trust
from snapshotter.imagefs.verdicts import Verdicts, Wrong
from snapshotter.indexes.compare import shows_otherwise
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

REBUILD_S = 3600.0


class Views(Protocol):
    """Where views are, and whether all of one is here."""

    async def whole(self, view: Digest) -> bool: ...

    def path(self, view: Digest, *, guarded: bool) -> Path: ...

    async def disown(self, view: Digest) -> None: ...


class Discards(Protocol):
    """Takes data and index of a layer away."""

    async def discard(self, layer: Layer) -> str: ...


@dataclass(frozen=True, slots=True)
class Means:
    """What the comparison stands on. ``blame``: a layer is refused, by blob, view and reason;
    ``count`` is told of each verdict: right or wrong."""

    shelf: Shelf
    trust: Trust
    catalog: Catalog
    views: Views
    ingest: Ingest
    mounts: LayerMounts
    discards: Discards
    verdicts: Verdicts
    blame: Callable[[Digest, Digest, str], Awaitable[None]]
    count: Callable[[str], object]
    clock: Clock


class Comparison:
    """Works in the background from ``start`` to ``stop``; ``wake`` when a view became complete."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._awake = asyncio.Event()
        self._stuck: set[Digest] = set()
        self._tried: set[Digest] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what an earlier daemon left."""
        self._awake.set()
        self._task = asyncio.create_task(self._run(), name="comparison")

    def wake(self) -> None:
        """A view became complete, or an index arrived."""
        self._awake.set()

    def suspect(self, view: Digest) -> None:
        """Chunks of the view do not come: perhaps because its index is wrong about them."""
        if view not in self._tried:
            self._stuck.add(view)
            self._awake.set()

    async def stop(self) -> None:
        """Stop in the middle; what was not compared is compared the next time."""
        await end_all([self._task])

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            stuck, self._stuck = self._stuck, set()
            for blob in await asyncio.to_thread(self._foreign):
                try:
                    await self._look_at(blob, stuck)
                except (EmberError, OSError) as error:
                    log.warning("the index of layer %s is not compared yet: %s", blob, error)
                except Exception:
                    log.exception("comparing the index of layer %s failed", blob)

    def _foreign(self) -> list[Digest]:
        """The layers whose index is neither ours nor signed by whom we trust."""
        directory, found = self._means.shelf.directory, []
        keys = self._means.trust.keys.read().keys
        for path in sorted(directory.glob(f"*{PROVENANCE_SUFFIX}")):
            provenance = read_provenance(path)
            signed = provenance.origin is Origin.SIGNED and provenance.key in keys
            if not provenance.own and not signed and path.with_suffix(".idx").exists():
                algorithm = "sha512" if len(path.stem) == 128 else "sha256"
                found.append(Digest(algorithm, path.stem))
        return found

    async def _look_at(self, blob: Digest, stuck: Collection[Digest]) -> None:
        means = self._means
        index = means.shelf.get(blob)
        if index is None:
            return
        if await means.views.whole(index.diff_id):
            verdict = await self._compare(index)
            if not await means.views.whole(index.diff_id) or means.shelf.get(blob) is not index:
                return  # it went meanwhile
            await self._judge(index, verdict)
        elif index.diff_id in stuck and await self._derive_from_blob(index):
            self._tried.add(index.diff_id)

    async def _compare(self, index: LayerIndex) -> Verdict:
        path = self._means.views.path(index.diff_id, guarded=False)
        return await compare_apart(self._means.shelf.path(index.layer), path)

    async def _derive_from_blob(self, index: LayerIndex) -> bool:
        """Its chunks do not come: what does the layer itself say? Ours takes its place at once.

        Whether that is known now; a layer that can't be had is asked for at the next complaint.
        """
        means = self._means
        provenance = means.shelf.provenance(index.layer)
        origin = next(iter(means.catalog.origins(index.layer)), None)
        if origin is None:
            return False
        fault = ""
        try:
            await self._rebuild(origin, index.diff_id)
        except RefusedError as error:  # there is no right index of such a layer
            fault = str(error)
        else:
            own = means.shelf.get(index.layer)
            if own is not None and await asyncio.to_thread(shows_otherwise, index, own):
                fault = "its chunks are not the layer's"
            elif own is not None:
                means.shelf.renewed(index.layer)
        if fault:
            await self._condemn(index, provenance, Verdict(False, fault))
        return True

    async def _judge(self, index: LayerIndex, verdict: Verdict) -> None:
        means, blob = self._means, index.layer
        provenance = means.shelf.provenance(blob)
        if not verdict.fault:
            with means.shelf.noting(blob):
                compared = replace(provenance, compared=True)
                await offload(None, means.shelf.vouch, blob, compared)
            means.count("right")
            log.info("layer %s: its index from elsewhere is what its bytes say", blob)
            return
        await self._condemn(index, provenance, verdict)

    async def _condemn(self, index: LayerIndex, provenance: Provenance, verdict: Verdict) -> None:
        """Say it, see to it that nobody new comes to it, and put what is right in its place.

        The index goes after the mounts that show it are set aside: whoever is killed in between
        finds it again, and condemns it again.
        """
        means, blob, view = self._means, index.layer, index.diff_id
        repository = next(iter(provenance.repositories), "")
        wrong = Wrong(blob, provenance.artifact, repository, verdict.fault)
        log.critical(
            "THE INDEX of layer %s (%s) %s IS WRONG: %s. What read it may have seen what the image"
            " does not hold%s",
            blob,
            ", ".join(means.catalog.names_of_blob(blob)) or "of no image that is known",
            wrong.source,
            verdict.fault,
            wrong.consequence,
        )
        means.count("wrong")
        await means.verdicts.condemn(wrong, means.clock.wall_ns())
        await means.blame(blob, view, f"an index of it from elsewhere was wrong: {verdict.fault}")
        await asyncio.to_thread(means.mounts.mark_suspect, self._stand_on(blob))
        origin = next(iter(means.catalog.origins(blob)), None)
        job = None
        if verdict.bytes_right and origin is not None:
            job = means.ingest.start_index(origin, view)  # who wants to mount it waits for that
        means.mounts.metadata.drop(blob.hex)
        means.shelf.drop(blob, with_note=verdict.bytes_right)
        await asyncio.to_thread(means.mounts.mark_suspect, self._stand_on(blob))  # come meanwhile
        if job is not None:
            await means.ingest.wait(job, REBUILD_S)
        elif not verdict.bytes_right:
            await self._without_bytes(Layer(blob, view, view, index.blob_bytes))

    def _stand_on(self, blob: Digest) -> list[Mounted]:
        """The instances that show what the index of ``blob`` said: its own, and those of layers
        above that were worked out by it. The images that those are made of go too."""
        means = self._means
        images = means.catalog.images_of_blob(blob)
        above = {layer.blob for image in images for layer in image.layers} - {blob}
        found = [m for m in means.mounts.instances() if m.layer == blob and not m.suspect]
        for other in above:
            means.mounts.metadata.drop_chains(other.hex)
        chained = [m for m in means.mounts.instances() if m.layer in above and not m.suspect]
        return found + [m for m in chained if m.key.startswith(f"{m.layer.hex}-")]

    async def _without_bytes(self, layer: Layer) -> None:
        """The view itself is wrong: whoever reads it goes on, and nobody else comes to it."""
        kept = await self._means.discards.discard(layer)
        if kept:
            log.error("what was here of layer %s is nobody else's: %s", layer.blob, kept)
            await self._means.views.disown(layer.diff_id)
            self._means.shelf.drop(layer.blob)

    async def _rebuild(self, origin: BlobRef, view: Digest) -> None:
        job = self._means.ingest.start_index(origin, view)
        await self._means.ingest.wait(job, REBUILD_S)
