"""What goes when the cache's disk is full: data of images that containerd removed, oldest first.

What a snapshot stands for, what is mounted and what is being fetched stays; so do indexes, which
make the next start of an evicted image lazy. It is asked by the store when a reservation fails.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator

from snapshotter.content import Digest
from snapshotter.imagefs.catalog import Catalog, Layer
from snapshotter.imagefs.removal import Remover
from snapshotter.imagefs.views import Views

log = logging.getLogger(__name__)


class Evictor:
    """``evict`` is a chunks.space.Evict over the catalog.

    ``standing``: the blobs that snapshots stand for.
    """

    def __init__(
        self,
        catalog: Catalog,
        views: Views,
        remover: Remover,
        standing: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        self._catalog = catalog
        self._views = views
        self._remover = remover
        self._standing = standing

    async def evict(self, length_bytes: int) -> int:
        """Free at least so many bytes, if that can be; how many became free."""
        standing = await self._standing()
        freed = 0
        for layer in self._oldest_first():
            if freed >= length_bytes:
                break
            if self._is_needed(layer.diff_id, standing):
                continue
            gone = await self._remover.evict(layer)
            if gone:
                log.warning("evicted the data of layer %s (%d bytes): no room", layer.blob, gone)
            freed += gone
        return freed

    def _oldest_first(self) -> Iterator[Layer]:
        """Each view once, at the time when an image with it was last pulled."""
        latest: dict[Digest, Layer] = {}
        for image in sorted(self._catalog.images(), key=lambda image: image.seen_ns):
            for layer in image.layers:
                latest.pop(layer.diff_id, None)
                latest[layer.diff_id] = layer
        yield from latest.values()

    def _is_needed(self, view: Digest, standing: Collection[str]) -> bool:
        if self._views.is_busy(view) or not self._views.bytes_on_disk(view):
            return True
        return any(str(blob) in standing for blob in self._catalog.layers_of_view(view))
