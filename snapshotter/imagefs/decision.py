"""Is this image served lazily? Decided once a pull, for all layers, before the first is answered.

What the whole image needs is looked at: a data path, its documents, an index for every layer (here,
or beside the image in its repository) or the leave to stream those that lack one, and credentials
that reach the origin. The answer comes within seconds whatever the network does; every "no" has a
reason that `ember status` shows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError, UnauthorizedError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.admission import Admission, Giver
from snapshotter.imagefs.catalog import Catalog, Image, Layer
from snapshotter.imagefs.pulls import Decision, Pull
from snapshotter.imagefs.shelf import Shelf
from snapshotter.snapshots.lazy import LayerClaim

log = logging.getLogger(__name__)

PENDING_DECISIONS = 1024
LEFT_SHARE = 0.4
"""Of the time that a decision may take, so much is left by a lookup for what comes after it."""

NO_LABELS = (
    "containerd sent no image labels; use `ember pull`, or set disable_snapshot_annotations = false"
    ' (CRI) and exports.enable_remote_snapshot_annotations = "true" (containerd 2.1 or later)'
)
NO_INDEX = "no index yet"
"""Begins the reasons that pass: such an image is indexed afterwards."""


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """What a manifest and its config say: the layers in order, and where the blobs are."""

    manifest: Digest
    reference: str
    repository: str
    layers: tuple[Layer, ...]


class Documents(Protocol):
    """Reads manifest and config, from containerd's content store first."""

    async def image(self, namespace: str, manifest: Digest, reference: str) -> ImageDocument: ...


class Origin(Giver, Protocol):
    """Asks the registry whether this node may read the image, and a layer."""

    async def check(self, reference: str, manifest: Digest) -> None:
        """Return if readable; UnauthorizedError, NotFoundError or UnavailableError if not."""
        ...


class Streams(Protocol):
    """Layers being streamed and indexed (ingest.py)."""

    def running(self, blob: Digest, diff_id: Digest) -> bool: ...

    def start(self, blob: BlobRef, diff_id: Digest) -> object: ...

    def rate(self, registry: str) -> float: ...


class Others(Protocol):
    """Indexes that others made (foreign.py)."""

    def doubtful(self, document: ImageDocument) -> dict[Layer, str]:
        """What is here of the image by indexes that do not count for it, and why not."""
        ...

    async def look(self, document: ImageDocument, wanted: Sequence[Layer]) -> str:
        """Have indexes for ``wanted`` here, within a budget; why there is none."""
        ...

    async def discard(self, doubtful: dict[Layer, str]) -> str | None:
        """Have these go, with what they brought; why the image can't be lazy, if they can't."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """``mode`` is auto, stream or overlay; ``budget_s`` is what a first pull may take in auto."""

    mode: str
    budget_s: float
    timeout_s: float
    no_path: str | None


class Decider:
    """One decision for each pull of an image into a namespace; twenty clients share it."""

    def __init__(
        self,
        policy: Policy,
        catalog: Catalog,
        shelf: Shelf,
        documents: Documents,
        origin: Origin,
        streams: Streams,
        others: Others,
        view_complete: Callable[[LayerIndex], Awaitable[bool]],
        index_later: Callable[[str, ImageDocument, Sequence[Layer]], None],
        clock: Clock,
    ) -> None:
        self._policy = policy
        self._catalog = catalog
        self._shelf = shelf
        self._documents = documents
        self._origin = origin
        self._admission = Admission(catalog, origin)
        self._streams = streams
        self._others = others
        self._view_complete = view_complete
        self._index_later = index_later
        self._clock = clock
        self.unlabelled = 0
        """Layers that were prepared without a word of their image, since the daemon's start."""
        self._pulls: dict[tuple[str, str], Pull] = {}
        self._pending: dict[tuple[str, str, str | None], asyncio.Task[Pull]] = {}

    async def decide(self, claim: LayerClaim) -> Decision:
        """The decision for the image that ``claim`` belongs to; no if it can't be made in time."""
        if not claim.manifest_digest or not claim.layer_digest:
            self.unlabelled += 1
            if self.unlabelled == 1:  # the status counts the others
                log.warning("a layer is unpacked as plain overlay: %s", NO_LABELS)
            return self._no(NO_LABELS)
        key = (claim.namespace, str(claim.manifest_digest))
        pull = self._pulls.get(key)
        if pull is not None and pull.has(claim, self._clock.monotonic_s()):
            return pull.answer(claim, self._clock.monotonic_s())
        asked = (*key, claim.image_ref)
        task = self._pending.get(asked)
        if task is None:
            if len(self._pending) >= PENDING_DECISIONS:
                return self._no("too many images are being decided on at once")
            task = asyncio.create_task(self._begin(key, claim), name=f"decide {key[1]}")
            self._pending[asked] = task
            task.add_done_callback(lambda _: self._pending.pop(asked, None))
        pull = await asyncio.shield(task)
        return pull.answer(claim, self._clock.monotonic_s())

    async def _begin(self, key: tuple[str, str], claim: LayerClaim) -> Pull:
        decision = await self._make(claim)
        pull = Pull(claim.image_ref, decision, decision.made_s)
        self._pulls.pop(key, None)
        while len(self._pulls) >= PENDING_DECISIONS:
            self._pulls.pop(next(iter(self._pulls)))
        self._pulls[key] = pull
        return pull

    def forget(self, manifest: Digest) -> None:
        """Drop what was decided for an image that was removed, or turned out to be unfit."""
        for key in [key for key in self._pulls if key[1] == str(manifest)]:
            del self._pulls[key]

    def _no(self, reason: str, layers: tuple[Layer, ...] = ()) -> Decision:
        return Decision(False, reason, layers, self._clock.monotonic_s())

    async def may_read(self, document: ImageDocument) -> bool:
        """Whether the document's repository gives all of its layers to this node."""
        deadline_s = self._deadline_s()
        asked = self._admission.check(document.repository, document.layers)
        return await self._refusal(asked, deadline_s) is None

    def _deadline_s(self) -> float:
        return asyncio.get_running_loop().time() + self._policy.timeout_s

    async def _make(self, claim: LayerClaim) -> Decision:
        manifest = Digest.parse(str(claim.manifest_digest))
        deadline_s = self._deadline_s()
        reason: str | None
        document = await self._read(claim, manifest, deadline_s)
        if isinstance(document, str):
            reason = f"manifest and config of {manifest} can't be read: {document}"
            document = ImageDocument(manifest, claim.image_ref or "", "", ())
            if self._catalog.image(manifest) is not None:
                return self._no(reason)
        else:
            reason = await self._obstacle(claim.namespace, document, deadline_s)
        lazy = reason is None
        await self._catalog.remember(
            Image(
                manifest,
                (document.reference,) if document.reference else (),
                (document.repository,) if lazy else (),
                document.layers,
                lazy,
                reason or "",
                self._clock.wall_ns(),
            )
        )
        if lazy:
            self._stream_missing(document)
        log.info("%s: %s", document.reference, "lazy" if lazy else f"not lazy: {reason}")
        return Decision(lazy, reason or "", document.layers, self._clock.monotonic_s())

    async def _read(
        self, claim: LayerClaim, manifest: Digest, deadline_s: float
    ) -> ImageDocument | str:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._documents.image(claim.namespace, manifest, claim.image_ref or "")
        except TimeoutError:
            return f"no answer within {self._policy.timeout_s:g} s"
        except EmberError as error:
            return str(error)

    def _unindexed(self, document: ImageDocument) -> list[Layer]:
        return [layer for layer in document.layers if self._shelf.get(layer.blob) is None]

    async def _obstacle(
        self, namespace: str, document: ImageDocument, deadline_s: float
    ) -> str | None:
        """Why not: first what is known here, then what the registry has to be asked."""
        reason = self.hindrance(document)
        if reason is not None:
            return reason
        missing = self._unindexed(document)
        doubtful = self._others.doubtful(document)
        stale = [layer for layer in document.layers if layer in doubtful]
        search = self._search(document, [*missing, *stale])
        try:
            here = not missing and not doubtful and await self._all_here(document, deadline_s)
            if here is None:
                return f"what is here of it could not be seen within {self._policy.timeout_s:g} s"
            if not here:
                asked = self._origin.check(document.reference, document.manifest)
                reason = await self._refusal(asked, deadline_s)
            if reason is None and search is not None:
                end_s = deadline_s - LEFT_SHARE * self._policy.timeout_s
                left_s = end_s - asyncio.get_running_loop().time()
                await asyncio.wait([search], timeout=max(0.0, left_s))
        finally:
            if search is not None:
                search.cancel()  # what it waits for goes on
        if reason is None:  # a stranger's index may have come meanwhile
            reason = await self._without_doubt(document, deadline_s)
        unknown = [
            layer
            for layer in self._unindexed(document)
            if not self._streams.running(layer.blob, layer.diff_id)
        ]
        if reason is None and unknown and self._policy.mode != "stream":
            reason = self._too_long(document, unknown)
            if reason is not None:
                self._index_later(namespace, document, unknown)
        if reason is None:
            asked = self._admission.check(document.repository, document.layers)
            reason = await self._refusal(asked, deadline_s)
        return reason

    def _search(self, document: ImageDocument, wanted: Sequence[Layer]) -> asyncio.Task[str] | None:
        """A lookup of what is not on its way already."""
        running = self._streams.running
        wanted = [each for each in wanted if not running(each.blob, each.diff_id)]
        if not wanted or not document.repository:
            return None
        return asyncio.create_task(self._others.look(document, wanted), name="look for indexes")

    async def _without_doubt(self, document: ImageDocument, deadline_s: float) -> str | None:
        """What does not count for this image goes, unless the image may not even be read."""
        doubtful = self._others.doubtful(document)
        if not doubtful:
            return None
        asked = self._admission.check(document.repository, document.layers)
        return await self._refusal(asked, deadline_s) or await self._others.discard(doubtful)

    def hindrance(self, document: ImageDocument) -> str | None:
        """Why the image could not be lazy on this node, whatever is fetched; None: it could."""
        return self._policy.no_path or self._fault(document)

    def _fault(self, document: ImageDocument) -> str | None:
        for layer in document.layers:
            fault = self._catalog.fault(layer.blob, layer.diff_id)
            if fault is not None:
                return f"layer {layer.blob} was refused: {fault}"
            index = self._shelf.get(layer.blob)
            if index is None or index.diff_id == layer.diff_id:
                continue
            if layer not in self._others.doubtful(document):
                return (
                    f"layer {layer.blob} unpacks to {index.diff_id}, but the image's config"
                    f" promises {layer.diff_id}"
                )
        return None

    async def _all_here(self, document: ImageDocument, deadline_s: float) -> bool | None:
        """None if it can't be said in time. Views are being opened then, and not in the middle of
        that is anything cancelled."""
        task = asyncio.create_task(self._look(document), name=f"look at {document.manifest}")
        left_s = deadline_s - asyncio.get_running_loop().time()
        await asyncio.wait([task], timeout=max(0.0, left_s))
        if task.done():
            return task.result()
        task.add_done_callback(_let_go)
        return None

    async def _look(self, document: ImageDocument) -> bool:
        for layer in document.layers:
            index = self._shelf.get(layer.blob)
            if index is None or not await self._view_complete(index):
                return False
        return True

    async def _refusal(self, asked: Awaitable[None], deadline_s: float) -> str | None:
        """Why the registry does not give what it is ``asked`` for."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await asked
        except UnauthorizedError as error:
            return f"Ember has no credentials for it (containerd does not hand on its own): {error}"
        except TimeoutError:
            return f"its registry did not answer within {self._policy.timeout_s:g} s"
        except EmberError as error:
            return f"its registry is out of Ember's reach: {error}"
        return None

    def _too_long(self, document: ImageDocument, unknown: Sequence[Layer]) -> str | None:
        if self._policy.mode == "overlay":
            return f'{NO_INDEX}, and first_pull.mode = "overlay": indexed after the pull'
        size = sum(layer.size_bytes for layer in unknown)
        registry = document.repository.split("/", 1)[0]
        rate = self._streams.rate(registry)
        expected_s = size / rate
        if expected_s <= self._policy.budget_s:
            return None
        return (
            f"{NO_INDEX}, and streaming {size / 1e6:.0f} MB at {rate / 1e6:.1f} MB/s would take"
            f" {expected_s:.0f} s, over first_pull.budget = {self._policy.budget_s:.0f} s:"
            " indexed after the pull"
        )

    def _stream_missing(self, document: ImageDocument) -> None:
        for layer in self._unindexed(document):
            if not self._streams.running(layer.blob, layer.diff_id):
                blob = BlobRef(document.repository, layer.blob, layer.size_bytes)
                self._streams.start(blob, layer.diff_id)


def _let_go(task: asyncio.Task[bool]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("%s: %s", task.get_name(), task.exception())
