"""Indexes that others made, as the decision on an image sees them: which count, and which must go.

A view is filled by what an index says of its chunks, so where an index does not count for an image
neither does what is here of the view: both go before the layer is built anew, or the image is not
lazy for as long as somebody stands on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

from snapshotter.content import Digest
from snapshotter.errors import EmberError
from snapshotter.imagefs.catalog import Catalog, Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.lookup import Lookup, Outcome
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.trust import Trust
from snapshotter.indexes.keys import Keyring

PLACES = 4
"""So many images and repositories are asked before a layer is brought anew."""

_GONE = "it came unsigned and is not here any more, but bytes that it let in may be"


class Discards(Protocol):
    """Takes data and index of a layer away (removal.py)."""

    async def discard(self, layer: Layer) -> str:
        """Why they stay, if they do."""
        ...


class ForeignIndexes:
    """Implements decision.Others. ``discards`` is set before the first question."""

    discards: Discards

    def __init__(self, catalog: Catalog, shelf: Shelf, trust: Trust, lookup: Lookup | None) -> None:
        self._catalog = catalog
        self._shelf = shelf
        self.trust = trust
        self.lookup = lookup

    def doubtful(self, document: ImageDocument) -> dict[Layer, str]:
        """The layers that are here by an index that does not count for this image, and why."""
        ring = cache(self.trust.keys.read)
        return self._doubtful(document.layers, [document.repository], ring)

    def doubts_of(self, layers: Iterable[Layer]) -> dict[Layer, str]:
        """As `doubtful`, for whatever repositories are known to have given each layer."""
        ring = cache(self.trust.keys.read)
        found: dict[Layer, str] = {}
        for layer in layers:
            places = [origin.repository for origin in self._catalog.origins(layer.blob)]
            found |= self._doubtful([layer], ["", *places], ring)
        return found

    async def renew(self, layers: Sequence[Layer]) -> dict[Layer, str]:
        """`doubts_of`, once it was asked beside the images that have them who else vouches for the
        very same: a key was changed, and the images were signed with the next one."""
        doubts = self.doubts_of(layers)
        if self.lookup is None or not doubts:
            return doubts
        images = [image for layer in doubts for image in self._images(layer.blob)]
        for document in list(dict.fromkeys(images))[:PLACES]:
            await self.look(document, list(self.doubtful(document)))
            doubts = self.doubts_of(layers)
            if not doubts:
                break
        return doubts

    def _images(self, blob: Digest) -> list[ImageDocument]:
        """The images that have this layer, in each repository that gave it; last seen first."""
        images = sorted(self._catalog.images_of_blob(blob), key=lambda image: -image.seen_ns)
        return [
            ImageDocument(image.manifest, next(iter(image.names), ""), repository, image.layers)
            for image in images
            for repository in image.repositories
        ]

    def _doubtful(
        self, layers: Iterable[Layer], places: Sequence[str], ring: Callable[[], Keyring]
    ) -> dict[Layer, str]:
        found = {}
        for layer in layers:
            for blob in self._blobs(layer):
                provenance = self._shelf.provenance(blob)
                if provenance.own:
                    continue
                if self._missing(blob):
                    if provenance.lingers:
                        found[replace(layer, blob=blob)] = _GONE
                    continue
                faults = [self.trust.fault(provenance, place, ring()) for place in places]
                if None not in faults:
                    found[replace(layer, blob=blob)] = str(faults[-1])
        return found

    def _blobs(self, layer: Layer) -> Iterable[Digest]:
        known = self._catalog.layers_of_view(layer.diff_id)
        return dict.fromkeys((layer.blob, *known, *self._shelf.strangers(layer.diff_id)))

    def _missing(self, blob: Digest) -> bool:
        try:
            return self._shelf.get(blob) is None
        except EmberError:
            return False

    async def look(self, document: ImageDocument, wanted: Sequence[Layer]) -> str:
        """Have what others made for ``wanted``; why it did not come, within the budget."""
        if self.lookup is None:
            return "index.lookup = false"
        return (await self.lookup.look(document, wanted)).why

    async def look_up(self, document: ImageDocument) -> None:
        """As `look`, for what has no index here."""
        missing = [layer for layer in document.layers if self._missing(layer.blob)]
        if missing:
            await self.look(document, missing)

    async def discard(self, doubtful: dict[Layer, str]) -> str | None:
        """Have these layers gone from here; why the image can't be lazy, if they can't go."""
        for layer, fault in doubtful.items():
            kept = await self.discards.discard(layer)
            if kept:
                return f"the index of layer {layer.blob} is not trusted ({fault}), and {kept}"
        return None

    def last(self, manifest: Digest) -> Outcome | None:
        """How the last lookup for the image ended."""
        return None if self.lookup is None else self.lookup.last.get(manifest)

    def forget(self, manifest: Digest) -> None:
        """The image is removed."""
        if self.lookup is not None:
            self.lookup.forget(manifest)
