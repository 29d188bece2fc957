"""May this image show a layer that is here? Only if its own repository gives that layer.

Bytes on the node belong to whoever could pull them: a manifest can name any digest, and must not
get at what was fetched with somebody else's credentials. What a repository gave is remembered with
the image that was let in; only what is not known of it yet is asked for, so an image that was here
before needs no registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from snapshotter.content import BlobRef
from snapshotter.imagefs.catalog import Catalog, Layer
from snapshotter.tasks import together

ASKED_AT_ONCE = 16


class Giver(Protocol):
    """The registries."""

    async def gives(self, blob: BlobRef) -> None:
        """Return if this node may read ``blob`` in its repository; UnauthorizedError,
        NotFoundError, UnavailableError or another EmberError if not."""
        ...


class Admission:
    """Asks repositories for layers that are not known to be theirs."""

    def __init__(self, catalog: Catalog, giver: Giver) -> None:
        self._catalog = catalog
        self._giver = giver

    async def check(self, repository: str, layers: Sequence[Layer]) -> None:
        """Return if ``repository`` gives every one of ``layers``; else the first EmberError."""
        unknown = {
            layer.blob: BlobRef(repository, layer.blob, layer.size_bytes)
            for layer in layers
            if not self._catalog.is_given(repository, layer.blob)
        }
        asking = [partial(self._giver.gives, blob) for blob in unknown.values()]
        await together(asking, ASKED_AT_ONCE)
