"""Dropping data: only what no other image needs and no EROFS instance has open.

The proof that nothing has a view open is the kernel's: mounts of ours are taken away first, and a
file that is still open after that belongs to a running container, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from snapshotter.content import Digest
from snapshotter.errors import FailedPreconditionError
from snapshotter.imagefs.catalog import Catalog, Image, Layer
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.metadata import MetadataImages
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views
from snapshotter.unbroken import Unbroken

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What went (``removed``), what stayed and why (``kept``), and how much room that made.

    ``in_use``: something stayed because somebody stands on it, so the image must stay known.
    """

    freed_bytes: int = 0
    in_use: bool = False
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def keep_in_use(self, layer: Layer, why: str) -> None:
        """Note that ``layer`` stays since it is in use."""
        self.in_use = True
        self.kept.append(f"layer {layer.blob}: in use{why}")


class Remover:
    """Removes an image's data, and with it its index and its record if that is asked for."""

    def __init__(
        self,
        catalog: Catalog,
        shelf: Shelf,
        ingest: Ingest,
        mounts: LayerMounts,
        views: Views,
        metadata: MetadataImages,
        standing: Callable[[], Awaitable[Collection[str]]],
        forget_origin: Callable[[Digest], None],
    ) -> None:
        """``standing``: the blobs that snapshots stand for, whatever image they are of.

        ``forget_origin``: a view's bytes have gone, and with them who brought them.
        """
        self._catalog = catalog
        self._shelf = shelf
        self._ingest = ingest
        self._mounts = mounts
        self._views = views
        self._metadata = metadata
        self._standing = standing
        self._forget_origin = forget_origin
        self._work = Unbroken()

    async def remove(self, image: Image, *, data_only: bool, keep_indexes: bool = False) -> Outcome:
        """Drop the data of ``image``; without ``data_only`` its indexes and its record too.

        With ``keep_indexes`` those that are here stay, and the record that leads to them.
        containerd must have forgotten the image by then: a layer that a snapshot still stands for
        is needed by an image that nobody told us of, and is kept with all that can bring it back.
        What has begun is finished, also if the caller is cancelled.
        """
        keep_indexes = keep_indexes and any(self._index_bytes(layer) for layer in image.layers)
        work = self._remove(image, data_only=data_only, keep_indexes=keep_indexes)
        return await self._work.finish(work)

    async def evict(self, layer: Layer) -> int:
        """Drop the layer's data if nothing uses it; how many bytes that freed."""
        outcome = Outcome()
        await self._work.finish(self._drop_view(layer, outcome))
        return outcome.freed_bytes

    async def discard(self, layer: Layer) -> str:
        """Drop the layer's data and its index, whoever has it; why they stay, if they do."""
        outcome = Outcome()
        await self._work.finish(self._discard(layer, outcome))
        return "; ".join(outcome.kept)

    async def _discard(self, layer: Layer, outcome: Outcome) -> None:
        if await self._drop_view(layer, outcome):
            self._forget_origin(layer.diff_id)
            self._drop_index(layer, outcome)
            await self._without_chains(layer)

    async def _without_chains(self, layer: Layer) -> None:
        """What was worked out for layers above ``layer`` stands on what its index said."""
        above = {
            each for image in self._catalog.images_of_blob(layer.blob) for each in image.layers
        }
        for each in above - {layer}:
            if not await self._mounts.stood_on(each.diff_id):
                async with self._mounts.without(each.diff_id):
                    self._metadata.drop_chains(each.blob.hex)

    def _index_bytes(self, layer: Layer) -> int:
        return self._shelf.bytes_on_disk(layer.blob)

    async def _remove(self, image: Image, *, data_only: bool, keep_indexes: bool) -> Outcome:
        outcome = Outcome()
        standing: Collection[str] = ()
        for layer in dict.fromkeys(image.layers):
            if not data_only:  # a pull may have come meanwhile
                standing = await self._standing()
            sharers = self._sharers(image, layer)
            if sharers:
                outcome.kept.append(f"layer {layer.blob}: {sharers[0]} has it too")
            elif str(layer.blob) in standing:
                outcome.keep_in_use(layer, ", a snapshot stands on it")
            elif keep_indexes and self._ingest.running(layer.blob, layer.diff_id):
                outcome.kept.append(f"layer {layer.blob}: it is being indexed")
            elif await self._drop_view(layer, outcome) and not data_only:
                self._forget_origin(layer.diff_id)
                if not keep_indexes:
                    self._drop_index(layer, outcome)
        if data_only and not image.lazy and not outcome.removed and not outcome.kept:
            outcome.kept.append(
                f"image {image.manifest}: a plain overlay image, whose bytes are containerd's;"
                " `ember rm` without --data takes them"
            )
        if keep_indexes and not outcome.in_use:
            size = sum(map(self._index_bytes, set(image.layers)))
            outcome.kept.append(
                f"indexes of {image.manifest} ({size} bytes): with them its next pull can be lazy;"
                " `ember rm` again takes them too"
            )
        elif not data_only and not outcome.in_use:
            if await self._catalog.forget(image.manifest, image.seen_ns):
                outcome.removed.append(f"image {image.manifest}")
            else:
                outcome.kept.append(f"image {image.manifest}: it is being pulled again")
        return outcome

    def _drop_index(self, layer: Layer, outcome: Outcome) -> None:
        size = self._index_bytes(layer)
        if size:
            outcome.freed_bytes += size
            outcome.removed.append(f"index of layer {layer.blob} ({size} bytes)")
        self._shelf.drop(layer.blob)
        self._metadata.drop(layer.blob.hex)

    def _sharers(self, image: Image, layer: Layer) -> list[str]:
        blobs = self._catalog.layers_of_view(layer.diff_id)
        return [
            other.names[0] if other.names else str(other.manifest)
            for blob in blobs
            for other in self._catalog.images_of_blob(blob)
            if other.manifest != image.manifest and other.lazy
        ]

    async def _drop_view(self, layer: Layer, outcome: Outcome) -> bool:
        """True if nothing of the layer's data is left."""
        if self._ingest.running(layer.blob, layer.diff_id):
            outcome.keep_in_use(layer, ", it is being indexed")
            return False
        if await self._mounts.stood_on(layer.diff_id):
            outcome.keep_in_use(layer, " by a running container")
            return False
        try:
            async with self._mounts.without(layer.diff_id):
                freed = await self._views.drop(layer.diff_id)
        except FailedPreconditionError:
            outcome.keep_in_use(layer, " by a running container")
            return False
        outcome.freed_bytes += freed
        if freed:
            outcome.removed.append(f"data of layer {layer.blob} ({freed} bytes)")
        return True
