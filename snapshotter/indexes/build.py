"""Building the indexes of an image: each distinct layer once, wherever it can be had cheapest.

A layer's index comes from the cache, from an artifact that a trusted key signed, or from reading
the layer; whichever it is, it lies in the cache afterwards. Memory and parallelism are bounded; a
build that ends early, for whatever reason, leaves whole indexes or none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from snapshotter.chunks.offload import offload
from snapshotter.content import BlobRef
from snapshotter.errors import EmberError, NoSpaceError, RefusedError
from snapshotter.image.feeding import feed
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import LayerIndexer
from snapshotter.indexes.cache import IndexCache
from snapshotter.indexes.fetched import Blobs, fetch_into
from snapshotter.indexes.find import Found
from snapshotter.indexes.publish import LocalIndex
from snapshotter.oci.documents import Descriptor
from snapshotter.oci.manifest import Index, candidates, parse_manifest
from snapshotter.oci.platform import Platform, host_platform
from snapshotter.oci.reference import Reference
from snapshotter.oci.resolver import (
    FetchedManifest,
    LayerDescriptor,
    ResolvedImage,
    resolve_image,
)
from snapshotter.tasks import together


class LayerSource(Protocol):
    """Where an image's documents and layers come from: a registry, a layout, containerd."""

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest: ...

    async def document(self, blob: BlobRef) -> bytes: ...

    def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """An artifact to take layers from, and the registry client that reads it."""

    source: Blobs
    found: Found


@dataclass(frozen=True, slots=True)
class Step:
    """How far a layer is. ``how``: ``cached``, ``shared``, ``reading``, ``built``."""

    layer: LayerDescriptor
    how: str
    done_bytes: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Built:
    """A layer's index in the cache. ``how`` as in Step."""

    layer: LayerDescriptor
    how: str
    local: LocalIndex

    @property
    def index(self) -> LayerIndex:
        return self.local.index


class Builder:
    """Builds for one source; ``close`` it."""

    def __init__(
        self,
        source: LayerSource,
        cache: IndexCache,
        told: Callable[[Step], None],
        *,
        parallel: int,
        shared: Sequence[Shared] = (),
    ) -> None:
        """``told`` hears of every step; ``shared`` are trusted artifacts, best first;
        ``parallel`` layers are read at once, with two threads each."""
        self._source = source
        self._cache = cache
        self._told = told
        self._shared = tuple(shared)
        self._parallel = parallel
        self._executor = ThreadPoolExecutor(parallel, thread_name_prefix="ember-build")

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)

    async def build(self, image: ResolvedImage) -> list[Built]:
        """The indexes of all distinct layers, in the image's order.

        Raises RefusedError for a layer that can't be indexed (the others' stay in the cache), and
        what reading the source and writing the cache raise.
        """
        if not image.layers:
            raise RefusedError(f"image {image.reference} has no layers: there is nothing to index")
        distinct = {layer.digest: layer for layer in image.layers}
        works = [partial(self._one, image, layer) for layer in distinct.values()]
        return await together(works, self._parallel)

    async def _one(self, image: ResolvedImage, layer: LayerDescriptor) -> Built:
        async with self._cache.alone(layer.digest):
            index = await offload(self._executor, self._cache.find, layer.digest, layer.diff_id)
            how, repository = "cached", ""
            if index is None:
                index, repository = await self._from_shared(layer)
                how = "shared"
            if index is None:
                index = await self._read(image.blob(layer), layer)
                how = "built"
        self._told(Step(layer, how, layer.size))
        windows = self._cache.windows_path(layer.digest) if index.windows_bytes else None
        return Built(layer, how, LocalIndex(index, windows, repository))

    async def _from_shared(self, layer: LayerDescriptor) -> tuple[LayerIndex | None, str]:
        """The index out of an artifact, with the repository that it came from."""
        for shared in self._shared:
            known = shared.found.artifact.layer(layer.digest)
            if known is None or known.diff_id != layer.diff_id:
                continue
            try:
                await fetch_into(shared.source, shared.found, layer, self._cache.directory)
            except NoSpaceError:
                raise
            except EmberError as error:  # wrong, gone or out of reach: the layer itself will do
                self._told(Step(layer, "shared", note=str(error)))
                continue
            index = await offload(self._executor, self._cache.find, layer.digest, layer.diff_id)
            if index is not None:
                return index, shared.found.repository
        return None, ""

    async def _read(self, blob: BlobRef, layer: LayerDescriptor) -> LayerIndex:
        self._told(Step(layer, "reading"))
        indexer = LayerIndexer(
            layer.digest,
            layer.diff_id,
            blob_bytes=layer.size,
            sink=None,
            directory=self._cache.directory,
        )
        done = 0

        def taken(length_bytes: int) -> None:
            nonlocal done
            done += length_bytes
            self._told(Step(layer, "reading", done))

        try:
            async with contextlib.aclosing(self._source.stream(blob)) as parts:
                await feed(indexer, parts, self._executor, taken)
            return await offload(self._executor, indexer.finish)
        finally:
            await offload(self._executor, indexer.close)


def default_parallel() -> int:
    """So many layers at once keep the cores busy: each uses about one and a half."""
    return max(1, min(4, os.cpu_count() or 1))


async def resolve_all(source: LayerSource, image: Reference) -> list[ResolvedImage]:
    """The image for every platform that it is offered for; one that names none is one image."""
    fetched = await source.manifest(image)
    top = parse_manifest(fetched.data, fetched.content_type, f"manifest {image}")
    if not isinstance(top, Index):
        return [await resolve_image(source, image, host_platform())]
    platforms = {_platform(entry) for entry in top.manifests if entry.platform is not None}
    found = [
        await resolve_image(source, image, platform)
        for platform in sorted(platforms, key=str)
        if platform.os != "unknown" and _exact(top, platform)
    ]
    if not found:
        raise EmberError(f"image {image}: its index names no platform; choose one with --platform")
    return list({one.manifest_digest: one for one in found}.values())


def _platform(entry: Descriptor) -> Platform:
    words = entry.platform or {}
    return Platform.of(words["os"], words["architecture"], words["variant"])


def _exact(index: Index, platform: Platform) -> bool:
    """Whether an entry is for this platform itself; attestations are none."""
    best = candidates(index, platform)
    return bool(best) and best[0].platform is not None and _platform(best[0]) == platform
