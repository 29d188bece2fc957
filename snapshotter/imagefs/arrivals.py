"""Indexes that others made arrive: fetched, checked wholly, put on the shelf with their origin.

An index of somebody else appears on the shelf only when nothing in it can be read in two ways, and
after the note that says whose it is. It never takes the place of one that is there. Its windows
come when chunks need them. Who waits for one registry holds up nobody who asks another one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from ioengine.directories import sync_directory
from snapshotter.chunks.offload import offload
from snapshotter.chunks.space import is_full
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import NoSpaceError, RefusedError, UnavailableError
from snapshotter.image.adopting import adopt_file
from snapshotter.image.adoption import Claim
from snapshotter.image.index import LayerIndex
from snapshotter.image.windows import WINDOWS_SUFFIX
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.provenance import Origin, Provenance
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.trust import Trust
from snapshotter.indexes.artifact import IndexedLayer
from snapshotter.indexes.compare import same_chunks
from snapshotter.indexes.fetched import Blobs, fetch_index
from snapshotter.keyed_locks import KeyedLocks

log = logging.getLogger(__name__)

CHECKS = max(2, min(8, os.cpu_count() or 1))
"""So many are checked at once: a large one takes a core and hundreds of megabytes."""
_TEMPORARY = ".tmp-"


class Arrivals:
    """Brings indexes, each layer once from each registry."""

    def __init__(
        self,
        shelf: Shelf,
        trust: Trust,
        blobs: Blobs,
        is_built: Callable[[Digest, Digest], bool],
        executor: Executor,
    ) -> None:
        """``is_built``: whether this node is about to have its own index of a layer."""
        self._shelf = shelf
        self._trust = trust
        self._blobs = blobs
        self._is_built = is_built
        self._executor = executor
        self._checks = asyncio.Semaphore(CHECKS)
        self._fetches = KeyedLocks[tuple[str, Digest]]()
        self._notes = KeyedLocks[Digest]()
        self.arrived: Callable[[], object] = _nobody

    async def bring(self, layer: Layer, offered: IndexedLayer, provenance: Provenance) -> bool:
        """Whether the layer has an index that counts now; see lookup.Fetched."""
        offered.check_offer(layer.diff_id, layer.size_bytes)
        registry = provenance.repositories[0].partition("/")[0]
        async with self._fetches.hold((registry, layer.blob)):
            async with self._notes.hold(layer.diff_id):
                known = await self._known(layer, offered, provenance)
            if known is not None:
                return known
            whole = replace(_full(offered, provenance), view=layer.diff_id)
            return await self._fetch(layer, offered, whole)

    async def _known(
        self, layer: Layer, offered: IndexedLayer, provenance: Provenance
    ) -> bool | None:
        """The answer where nothing need be fetched, because one is there or about to be."""
        if self._shelf.get(layer.blob) is not None:
            return await self._vouch(layer, offered, provenance)
        if self._is_built(layer.blob, layer.diff_id):
            return False
        if self._shelf.provenance(layer.blob).lingers:
            return False  # the view has to go first, with what another one let in
        return None

    async def _vouch(self, layer: Layer, offered: IndexedLayer, provenance: Provenance) -> bool:
        """One is there: whether it counts, by itself or since this very one is offered here too."""
        known, repository = self._shelf.provenance(layer.blob), provenance.repositories[0]
        if self._trust.fault(known, repository, self._trust.keys.read()) is None:
            return True
        if known.index != offered.plain.digest or known.origin is Origin.UNKNOWN:
            return False
        if provenance.origin is Origin.SIGNED:
            known = replace(known, origin=Origin.SIGNED, key=provenance.key)
            known = replace(known, artifact=provenance.artifact)
        with self._shelf.noting(layer.blob):
            offered_too = known.offered_by(repository)
            await offload(self._executor, self._shelf.vouch, layer.blob, offered_too)
        return True

    async def _fetch(self, layer: Layer, offered: IndexedLayer, provenance: Provenance) -> bool:
        path = self._shelf.path(layer.blob)
        temporary = path.with_name(f"{path.name}{_TEMPORARY}{secrets.token_hex(6)}")
        repository = provenance.repositories[0]
        try:
            await fetch_index(self._blobs, repository, offered, temporary, self._executor)
            windows_bytes = 0 if provenance.windows is None else provenance.windows.size_bytes
            claim = Claim(layer.blob, layer.diff_id, layer.size_bytes, windows_bytes)
            async with self._checks:
                await adopt_file(temporary, claim, executor=self._executor)
            async with self._notes.hold(layer.diff_id):  # two packings may say different things
                known = await self._known(layer, offered, provenance)
                if known is not None:
                    return known
                self._check_bytes(layer, temporary, provenance)
                path.with_suffix(WINDOWS_SUFFIX).unlink(missing_ok=True)  # another index's
                with self._shelf.noting(layer.blob):
                    await offload(self._executor, self._publish, layer.blob, temporary, provenance)
            self.arrived()
        except OSError as error:
            kind = NoSpaceError if is_full(error) else UnavailableError
            raise kind(f"the index of layer {layer.blob} can't be kept: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _check_bytes(self, layer: Layer, path: Path, provenance: Provenance) -> None:
        """A view is shared by all layers that unpack to it: what nobody signed must not say
        anything else of its bytes than what is known of them."""
        if provenance.origin is Origin.SIGNED:
            return
        for source in self._shelf.of_view(layer.diff_id):
            if not same_chunks(source.index, LayerIndex.open(path, verify=False)):
                raise RefusedError(
                    f"the index of layer {layer.blob} says of its bytes something else than that"
                    f" of {source.index.layer}, which is here"
                )

    def _publish(self, blob: Digest, temporary: Path, provenance: Provenance) -> None:
        """First whose it is, then the index, which takes nobody's place."""
        path = self._shelf.path(blob)
        if path.exists():
            return
        self._shelf.vouch(blob, provenance)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
        sync_directory(path.parent)


def _nobody() -> None:
    """Nobody wants to know."""


def _full(offered: IndexedLayer, provenance: Provenance) -> Provenance:
    content, windows = offered.windows, None
    if content is not None:
        windows = BlobRef(provenance.repositories[0], content.digest, content.size_bytes)
    return replace(provenance, index=offered.plain.digest, windows=windows)
