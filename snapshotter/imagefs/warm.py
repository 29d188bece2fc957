"""Warm images: every byte of an image brought to this node before anybody asks for it.

A layer with an index comes over the road, by ranges; one without is streamed whole and indexed on
the way, as at a first pull. Who wants the same layer shares the work, and it ends with the last of
them; what has come stays. The image is known from then on, though no snapshot stands for it, and
its repository must give every layer, also those that are here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import (
    DeadlineError,
    EmberError,
    FailedPreconditionError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    restated,
)
from snapshotter.fetch import Tally
from snapshotter.imagefs.admission import Admission, Giver
from snapshotter.imagefs.catalog import Catalog, Image, Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views

WINDOWS_AT_ONCE = 16
"""So many ranges of a layer are asked for side by side; how many run, the road's slots say."""
LAYERS_AT_ONCE = 16
ROUNDS = 8
"""A view may be let go of under the work, with its last mount: so often it is taken up again."""


class Road(Protocol):
    """The road (fetch/), as far as whole views are concerned."""

    async def complete(self, view_id: Digest, *, at_once: int) -> None: ...

    def tally(self, view_id: Digest) -> Tally: ...


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """``done_bytes`` of ``size_bytes`` stored bytes are here; ``state``: waiting, fetching, here.

    ``done_bytes`` is exact of what is streamed, and by the share of the chunks of what is not.
    ``fetched_bytes`` came since the caller asked, whoever wanted them.
    """

    blob: Digest
    size_bytes: int
    done_bytes: int
    fetched_bytes: int
    state: str


@dataclass(slots=True)
class _Work:
    """One layer on its way, and how many want it."""

    task: asyncio.Task[None]
    wanted: int = 0


class Warmer:
    """Event loop only; nothing of it outlives the blocks of ``warming``."""

    def __init__(
        self,
        catalog: Catalog,
        shelf: Shelf,
        ingest: Ingest,
        views: Views,
        road: Road,
        giver: Giver,
        hindrance: Callable[[ImageDocument], str | None],
        clock: Clock,
    ) -> None:
        """``hindrance``: why the image can't be lazy on this node, whatever is here of it."""
        self._catalog = catalog
        self._shelf = shelf
        self._ingest = ingest
        self._views = views
        self._road = road
        self._admission = Admission(catalog, giver)
        self._hindrance = hindrance
        self._clock = clock
        self._works: dict[tuple[Digest, Digest], _Work] = {}
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        """Of each registry, while it is used: one that hangs holds up nobody else's images."""
        self.look_up: Callable[[ImageDocument], Awaitable[None]] = _look_nowhere
        """Finds indexes elsewhere, within its own time; what it has found is on the shelf then."""

    @contextlib.asynccontextmanager
    async def warming(self, document: ImageDocument) -> AsyncIterator[Warming]:
        """Bring the image for the length of the block, or until all of it is here.

        FailedPreconditionError if nothing of it could be used here; else what its repository says
        that does not give a layer.
        """
        reason = self._hindrance(document)
        if reason is not None:
            raise FailedPreconditionError(f"{document.reference} cannot be lazy here: {reason}")
        await self._admission.check(document.repository, document.layers)
        await self._remember(document)
        await self.look_up(document)
        layers = tuple({(one.blob, one.diff_id): one for one in document.layers}.values())
        before = [self.brought_bytes(layer) for layer in layers]
        works = [self._join(document.repository, layer) for layer in layers]
        try:
            yield Warming(self, document, layers, [work.task for work in works], before)
        finally:
            await self._leave(layers, works)

    async def close(self) -> None:
        """Whoever waits is told at once that this daemon is stopping."""
        for work in self._works.values():
            work.task.cancel()

    def is_known(self, manifest: Digest) -> bool:
        """Whether the image has not been removed meanwhile."""
        return self._catalog.image(manifest) is not None

    async def refused(self, document: ImageDocument, error: RefusedError) -> None:
        """A layer is of no use: the image can't be lazy, and says so from now on."""
        known = self._catalog.image(document.manifest)
        if known is not None:
            await self._catalog.remember(replace(known, lazy=False, reason=str(error)))

    def brought_bytes(self, layer: Layer) -> int:
        """Stored bytes of the layer's view that came to this node since the daemon's start."""
        view = layer.diff_id
        tally, job = self._road.tally(view), self._ingest.job(layer.blob, view)
        running = job.done_bytes if job is not None and not job.finished.is_set() else 0
        streamed = self._ingest.streamed_bytes(view)
        return sum(tally.bytes_by_tier.values()) + streamed + running

    def done_bytes(self, layer: Layer) -> int:
        """Of a layer that is on its way or waits for its turn."""
        job = self._ingest.job(layer.blob, layer.diff_id)
        if job is not None and not job.finished.is_set():
            return job.done_bytes
        index, here = self._shelf.get(layer.blob), self._views.here_bytes(layer.diff_id)
        if index is None or here is None:
            return 0
        return layer.size_bytes * here // max(1, index.view_bytes)

    async def _remember(self, document: ImageDocument) -> None:
        """An image that was pulled as plain overlays stays what it is until it is pulled again."""
        known = self._catalog.image(document.manifest)
        await self._catalog.remember(
            Image(
                document.manifest,
                (document.reference,),
                (document.repository,),
                document.layers,
                known.lazy if known is not None else True,
                known.reason if known is not None else "",
                self._clock.wall_ns(),
            )
        )

    def _join(self, repository: str, layer: Layer) -> _Work:
        key = (layer.blob, layer.diff_id)
        work = self._works.get(key)
        if work is None or work.task.done():
            blob = BlobRef(repository, layer.blob, layer.size_bytes)
            task = asyncio.create_task(self._bring(blob, layer.diff_id), name=f"warm {layer.blob}")
            work = self._works[key] = _Work(task)
        work.wanted += 1
        return work

    async def _leave(self, layers: Sequence[Layer], works: Sequence[_Work]) -> None:
        ended = []
        for layer, work in zip(layers, works, strict=True):
            work.wanted -= 1
            if not work.wanted:
                key = (layer.blob, layer.diff_id)
                if self._works.get(key) is work:
                    del self._works[key]
                work.task.cancel()
                ended.append(work.task)
        await asyncio.gather(*ended, return_exceptions=True)

    async def _bring(self, blob: BlobRef, view: Digest) -> None:
        registry = blob.repository.partition("/")[0]
        turns = self._turns.setdefault(registry, asyncio.Semaphore(LAYERS_AT_ONCE))
        async with self._views.keep(view), turns:
            idle_rounds = 0
            while idle_rounds < ROUNDS:
                before = self._views.here_bytes(view)
                if self._shelf.get(blob.digest) is None:
                    await self._stream(blob, view)
                late = None
                try:
                    await self._road.complete(view, at_once=WINDOWS_AT_ONCE)
                except DeadlineError as error:
                    late = restated(error)
                except NotFoundError:  # its index went, perhaps with another image
                    if not self._catalog.images_of_blob(blob.digest):
                        raise
                if await self._views.whole(view):
                    return
                stuck = before is not None and before == self._views.here_bytes(view)
                if late is not None and stuck:
                    raise late
                idle_rounds = idle_rounds + 1 if stuck or before is None else 0
        raise UnavailableError(f"layer {blob.digest} is taken away as fast as it comes; try later")

    async def _stream(self, blob: BlobRef, view: Digest) -> None:
        async with self._ingest.wanted(blob, view) as job:
            await job.finished.wait()
            if job.error is not None:
                raise restated(job.error)


class Warming:
    """One image on its way for one caller."""

    def __init__(
        self,
        warmer: Warmer,
        document: ImageDocument,
        layers: Sequence[Layer],
        tasks: Sequence[asyncio.Task[None]],
        before: Sequence[int],
    ) -> None:
        self._warmer = warmer
        self._document = document
        self._layers = layers
        self._tasks = tasks
        self._before = before

    async def wait(self, wait_s: float) -> bool:
        """True if all of it is here within ``wait_s``; raises why the first layer that failed did.

        NotFoundError: the image was removed meanwhile.
        """
        done, left = set[asyncio.Task[None]](), set(self._tasks)
        if left:
            done, left = await asyncio.wait(
                left, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION
            )
        if not self._warmer.is_known(self._document.manifest):
            raise NotFoundError(f"{self._document.reference} was removed meanwhile")
        for task in done:
            if task.cancelled():
                raise UnavailableError("this daemon is stopping; ask again when it is back")
            error = task.exception()
            if isinstance(error, RefusedError):
                await self._warmer.refused(self._document, error)
            if error is not None:
                raise restated(error) if isinstance(error, EmberError) else error
        return not left

    def progress(self) -> list[LayerProgress]:
        """How far each layer is, lowest first."""
        return [
            self._layer(layer, task, before)
            for layer, task, before in zip(self._layers, self._tasks, self._before, strict=True)
        ]

    def _layer(self, layer: Layer, task: asyncio.Task[None], before: int) -> LayerProgress:
        fetched = max(0, self._warmer.brought_bytes(layer) - before)
        if task.done():
            return LayerProgress(layer.blob, layer.size_bytes, layer.size_bytes, fetched, "here")
        done = self._warmer.done_bytes(layer)
        state = "fetching" if done or fetched else "waiting"
        return LayerProgress(layer.blob, layer.size_bytes, done, fetched, state)


async def _look_nowhere(document: ImageDocument) -> None:
    """Indexes are only made here."""
