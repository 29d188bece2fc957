"""Is this image served lazily? Decided once a pull, for all layers, before the first is answered.

What the whole image needs is looked at: a data path, its documents, an index for every layer or the
leave to stream those that lack one, and credentials that reach the origin. The answer comes within
seconds whatever the network does; every "no" has a reason that `ember status` shows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError, UnauthorizedError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import Catalog, Image, Layer
from snapshotter.imagefs.shelf import Shelf
from snapshotter.snapshots.lazy import LayerClaim

log = logging.getLogger(__name__)

YES_HOLDS_S = 60.0
PENDING_DECISIONS = 1024

NO_LABELS = (
    "containerd sent no image labels; use `ember pull`, or set disable_snapshot_annotations = false"
    ' (CRI) and exports.enable_remote_snapshot_annotations = "true" (containerd 2.1 or later)'
)


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


class Origin(Protocol):
    """Asks the registry whether this node may read the image."""

    async def check(self, reference: str, manifest: Digest) -> None:
        """Return if readable; UnauthorizedError, NotFoundError or UnavailableError if not."""
        ...


class Streams(Protocol):
    """Layers being streamed and indexed (ingest.py)."""

    def running(self, blob: Digest, diff_id: Digest) -> bool: ...

    def start(self, blob: BlobRef, diff_id: Digest) -> object: ...

    def rate(self, registry: str) -> float: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """``mode`` is auto, stream or overlay; ``budget_s`` is what a first pull may take in auto."""

    mode: str
    budget_s: float
    timeout_s: float
    no_path: str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for all layers of an image."""

    lazy: bool
    reason: str
    layers: tuple[Layer, ...]
    made_s: float


@dataclass(slots=True)
class _Pull:
    """What was decided for a pull of an image, and the chains that were answered with it."""

    decision: Decision
    answered: set[str] = field(default_factory=set)

    def has(self, claim: LayerClaim, now_s: float) -> bool:
        """Whether ``claim`` belongs to this pull, so that what was decided holds for it too.

        A lazy pull is over within moments: nothing is fetched between its layers. One that
        containerd does itself may take an hour, and indexing begins meanwhile. It goes on as long
        as a layer is unpacked, and with the layer above each that was.
        """
        if self.decision.lazy:
            return now_s - self.decision.made_s < YES_HOLDS_S
        if claim.being_unpacked:
            return True
        parent = claim.below[-1].chain_id if claim.below else None
        return parent in self.answered and claim.chain_id not in self.answered


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
        view_complete: Callable[[LayerIndex], Awaitable[bool]],
        index_later: Callable[[str, ImageDocument, Sequence[Layer]], None],
        clock: Clock,
    ) -> None:
        self._policy = policy
        self._catalog = catalog
        self._shelf = shelf
        self._documents = documents
        self._origin = origin
        self._streams = streams
        self._view_complete = view_complete
        self._index_later = index_later
        self._clock = clock
        self.unlabelled = 0
        """Layers that were prepared without a word of their image, since the daemon's start."""
        self._pulls: dict[tuple[str, str], _Pull] = {}
        self._pending: dict[tuple[str, str], asyncio.Task[_Pull]] = {}

    async def decide(self, claim: LayerClaim) -> Decision:
        """The decision for the image that ``claim`` belongs to; never raises, never waits long."""
        if not claim.manifest_digest or not claim.layer_digest:
            self.unlabelled += 1
            return self._no(NO_LABELS)
        key = (claim.namespace, str(claim.manifest_digest))
        pull = self._pulls.get(key)
        if pull is not None and pull.has(claim, self._clock.monotonic_s()):
            pull.answered.add(claim.chain_id)
            return pull.decision
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= PENDING_DECISIONS:
                return self._no("too many images are being decided on at once")
            task = asyncio.create_task(self._begin(key, claim), name=f"decide {key[1]}")
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        pull = await asyncio.shield(task)
        pull.answered.add(claim.chain_id)
        return pull.decision

    async def _begin(self, key: tuple[str, str], claim: LayerClaim) -> _Pull:
        pull = _Pull(await self._make(claim))
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

    async def _make(self, claim: LayerClaim) -> Decision:
        manifest = Digest.parse(str(claim.manifest_digest))
        reason: str | None
        document = await self._within(
            self._documents.image(claim.namespace, manifest, claim.image_ref or "")
        )
        if isinstance(document, str):
            reason = f"manifest and config of {manifest} can't be read: {document}"
            document = ImageDocument(manifest, claim.image_ref or "", "", ())
            if self._catalog.image(manifest) is not None:
                return self._no(reason)
        else:
            reason = await self._obstacle(claim.namespace, document)
        lazy = reason is None
        await self._catalog.remember(
            Image(
                manifest,
                (document.reference,) if document.reference else (),
                (document.repository,) if document.repository else (),
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

    async def _within(self, work: Awaitable[ImageDocument]) -> ImageDocument | str:
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await work
        except TimeoutError:
            return f"no answer within {self._policy.timeout_s:g} s"
        except EmberError as error:
            return str(error)

    def _unindexed(self, document: ImageDocument) -> list[Layer]:
        return [layer for layer in document.layers if self._shelf.get(layer.blob) is None]

    async def _obstacle(self, namespace: str, document: ImageDocument) -> str | None:
        if self._policy.no_path is not None:
            return self._policy.no_path
        for layer in document.layers:
            fault = self._catalog.fault(layer.blob, layer.diff_id)
            if fault is not None:
                return f"layer {layer.blob} was refused: {fault}"
            index = self._shelf.get(layer.blob)
            if index is not None and index.diff_id != layer.diff_id:
                return (
                    f"layer {layer.blob} unpacks to {index.diff_id}, but the image's config"
                    f" promises {layer.diff_id}"
                )
        missing = self._unindexed(document)
        if missing or not await self._all_here(document):
            unreachable = await self._unreachable(document)
            if unreachable is not None:
                return unreachable
        unknown = [
            layer for layer in missing if not self._streams.running(layer.blob, layer.diff_id)
        ]
        if not unknown or self._policy.mode == "stream":
            return None
        reason = self._too_long(document, unknown)
        if reason is not None:
            self._index_later(namespace, document, unknown)
        return reason

    async def _all_here(self, document: ImageDocument) -> bool:
        for layer in document.layers:
            index = self._shelf.get(layer.blob)
            if index is None or not await self._view_complete(index):
                return False
        return True

    async def _unreachable(self, document: ImageDocument) -> str | None:
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                await self._origin.check(document.reference, document.manifest)
        except UnauthorizedError as error:
            return f"Ember has no credentials for it (containerd does not hand on its own): {error}"
        except TimeoutError:
            return f"its registry did not answer within {self._policy.timeout_s:g} s"
        except EmberError as error:
            return f"its registry is out of Ember's reach: {error}"
        return None

    def _too_long(self, document: ImageDocument, unknown: Sequence[Layer]) -> str | None:
        if self._policy.mode == "overlay":
            return 'no index yet, and first_pull.mode = "overlay": indexed after the pull'
        size = sum(layer.size_bytes for layer in unknown)
        registry = document.repository.split("/", 1)[0]
        rate = self._streams.rate(registry)
        expected_s = size / rate
        if expected_s <= self._policy.budget_s:
            return None
        return (
            f"no index yet, and streaming {size / 1e6:.0f} MB at {rate / 1e6:.1f} MB/s would take"
            f" {expected_s:.0f} s, over first_pull.budget = {self._policy.budget_s:.0f} s:"
            " indexed after the pull"
        )

    def _stream_missing(self, document: ImageDocument) -> None:
        for layer in self._unindexed(document):
            if not self._streams.running(layer.blob, layer.diff_id):
                blob = BlobRef(document.repository, layer.blob, layer.size_bytes)
                self._streams.start(blob, layer.diff_id)
