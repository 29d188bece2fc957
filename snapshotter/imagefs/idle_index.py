"""Images that went the overlay way: indexed afterwards from containerd's content store.

No byte is fetched twice: the blob is read where containerd keeps it. One layer at a time, and only
while no first pull is going on. A blob that containerd has thrown away is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.shelf import Shelf
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

POLL_S = 2.0
PULL_LIMIT_S = 3600.0
RETRY_S = 10.0
FAULT_RETRY_S = 120.0
"""After a fault of our own, which is not soon over."""
WAITING = 4096


class ContentStore(Protocol):
    """containerd's content store."""

    async def blob_size(self, namespace: str, digest: Digest) -> int: ...

    def stream_blob(self, namespace: str, digest: Digest) -> AsyncIterator[bytes]: ...

    async def namespaces(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    namespace: str
    repository: str
    layer: Layer
    until_s: float
    not_before_s: float = 0.0


class IdleIndexer:
    """A bounded queue of layers whose index is wanted, worked off in the background."""

    def __init__(
        self,
        store: ContentStore,
        ingest: Ingest,
        shelf: Shelf,
        clock: Clock,
        unpacked: Callable[[], Iterable[tuple[str, Layer]]],
    ) -> None:
        """``unpacked``: repository and layer of what went the overlay way in earlier days."""
        self._store = store
        self._unpacked = unpacked
        self._left: list[tuple[str, Layer]] = []
        self._ingest = ingest
        self._shelf = shelf
        self._clock = clock
        self._wanted: dict[Digest, _Wanted] = {}
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work, first on what an earlier daemon did not come to."""
        self._left = list(itertools.islice(self._unpacked(), WAITING))
        if self._left:
            self._awake.set()
        self._task = asyncio.create_task(self._run(), name="idle indexing")

    async def stop(self) -> None:
        """Stop; what is half indexed is indexed again when it is asked for."""
        await end_all([self._task])

    def want(self, namespace: str, document: ImageDocument, layers: Sequence[Layer]) -> None:
        """Index ``layers`` once containerd has them."""
        for layer in layers:
            self._want(namespace, document.repository, layer)
        self._awake.set()

    def _want(self, namespace: str, repository: str, layer: Layer) -> None:
        until_s = self._clock.monotonic_s() + PULL_LIMIT_S
        if len(self._wanted) < WAITING:
            self._wanted[layer.blob] = _Wanted(namespace, repository, layer, until_s)

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            while self._wanted or self._left:
                await self._clock.sleep(POLL_S)
                if self._ingest.jobs():
                    continue
                await self._take_up()
                await self._step()
            self._awake.clear()

    async def _take_up(self) -> None:
        """Want what was left, where containerd has it still; later if it does not answer."""
        if not self._left:
            return
        try:
            namespaces = await self._store.namespaces()
        except EmberError:
            return
        left, self._left = await asyncio.to_thread(self._without_index, self._left), []
        for repository, layer in left:
            for namespace in namespaces:
                with contextlib.suppress(EmberError):
                    await self._store.blob_size(namespace, layer.blob)
                    self._want(namespace, repository, layer)
                    break

    def _without_index(self, found: list[tuple[str, Layer]]) -> list[tuple[str, Layer]]:
        return [one for one in found if not self._shelf.path(one[1].blob).exists()]

    async def _step(self) -> None:
        """Index one layer that containerd has by now; drop what is done, refused or too old."""
        for wanted in list(self._wanted.values()):
            try:
                if await self._began(wanted):
                    return
            except EmberError:
                continue
            except Exception:
                log.exception("layer %s is not indexed; it is tried again", wanted.layer.blob)
                later_s = self._clock.monotonic_s() + FAULT_RETRY_S
                self._wanted[wanted.layer.blob] = replace(wanted, not_before_s=later_s)

    async def _began(self, wanted: _Wanted) -> bool:
        """Whether it was this layer's turn. EmberError: not yet."""
        now_s, digest = self._clock.monotonic_s(), wanted.layer.blob
        if now_s < wanted.not_before_s:
            return False
        if now_s > wanted.until_s or self._shelf.get(digest) is not None:
            del self._wanted[digest]
            return False
        await self._store.blob_size(wanted.namespace, digest)
        del self._wanted[digest]
        await self._index(wanted)
        return True

    async def _index(self, wanted: _Wanted) -> None:
        layer = wanted.layer
        blob = BlobRef(wanted.repository, layer.blob, layer.size_bytes)

        def source(ref: BlobRef) -> AsyncIterator[bytes]:
            return self._store.stream_blob(wanted.namespace, ref.digest)

        job = self._ingest.start_from(blob, layer.diff_id, source)
        try:
            indexed = await self._ingest.wait(job, PULL_LIMIT_S)
        except EmberError as error:
            if error.retryable:  # above all a full disk: the blob stays, and so does the wish
                self._again(wanted)
            log.warning("layer %s is not indexed: %s", layer.blob, error)
        else:
            if indexed:
                log.info(
                    "layer %s is indexed; its image can be lazy when pulled again",
                    layer.blob,
                )
            else:
                self._again(wanted)
                log.warning("layer %s is not indexed after %g s", layer.blob, PULL_LIMIT_S)

    def _again(self, wanted: _Wanted) -> None:
        now_s = self._clock.monotonic_s()
        later = replace(wanted, not_before_s=now_s + RETRY_S, until_s=now_s + PULL_LIMIT_S)
        self._wanted[wanted.layer.blob] = later
