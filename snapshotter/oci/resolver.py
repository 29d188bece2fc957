"""A reference → one verified image: down through indexes to a manifest, its config, its layers.

Every document is held to the digest and length that named it. Nothing is fetched but what leads
to this platform's image. Knows the client only as something that can fetch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import NotFoundError, RefusedError
from snapshotter.oci.documents import DOCUMENT_LIMIT_BYTES, Descriptor
from snapshotter.oci.manifest import (
    ImageConfig,
    Index,
    Manifest,
    candidates,
    offered,
    parse_config,
    parse_manifest,
)
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import Reference

_DEPTH_LIMIT = 4
_DOCUMENT_COUNT_LIMIT = 32


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """A layer, lowest first in its image; ``size`` is that of the stored blob in bytes."""

    digest: Digest
    size: int
    media_type: str
    annotations: dict[str, str]
    diff_id: Digest


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image for one platform. ``manifest`` and ``config`` are the very bytes of the digests.

    ``target_digest`` is what the reference named: an index's digest, or the manifest's.
    """

    reference: Reference
    target_digest: Digest
    target_media_type: str
    manifest_digest: Digest
    manifest_media_type: str
    manifest: bytes = field(repr=False)
    index: bytes | None = field(repr=False)
    config_digest: Digest
    config: bytes = field(repr=False)
    layers: tuple[LayerDescriptor, ...]
    platform: Platform

    def blob(self, layer: LayerDescriptor) -> BlobRef:
        """The layer as the client's `read` and `stream` want it."""
        return BlobRef(self.reference.name, layer.digest, layer.size)


@dataclass(frozen=True, slots=True)
class FetchedManifest:
    """What a registry served under ``manifests/``, held to its digest. ``content_type`` is the
    registry's word alone."""

    data: bytes = field(repr=False)
    digest: Digest
    content_type: str


class Fetcher(Protocol):
    """What resolving needs of a registry client. Both hold what they bring to its digest."""

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest: ...

    async def document(self, blob: BlobRef) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Found:
    digest: Digest
    data: bytes
    manifest: Manifest
    config: ImageConfig
    config_data: bytes


async def resolve_image(
    fetcher: Fetcher, reference: Reference, platform: Platform
) -> ResolvedImage:
    """See RegistryClient.resolve."""
    fetched = await fetcher.manifest(reference)
    top = parse_manifest(fetched.data, fetched.content_type, f"manifest {reference}")
    search = _Search(fetcher, reference, platform)
    if isinstance(top, Index):
        found = await search.descend(top, 1)
        if found is None:
            raise NotFoundError(
                f"image {reference}: nothing for {platform}; it is offered for {offered(top)}"
            )
    else:
        found = await search.load(fetched.digest, fetched.data, top)
    return ResolvedImage(
        reference=reference,
        target_digest=fetched.digest,
        target_media_type=top.media_type,
        manifest_digest=found.digest,
        manifest_media_type=found.manifest.media_type,
        manifest=found.data,
        index=fetched.data if isinstance(top, Index) else None,
        config_digest=found.manifest.config.digest,
        config=found.config_data,
        layers=_join(found, reference),
        platform=found.config.platform if found.config.platform.os else platform,
    )


class _Search:
    """The way down an index, bounded in depth and in the number of documents."""

    def __init__(self, fetcher: Fetcher, reference: Reference, platform: Platform) -> None:
        self._fetcher = fetcher
        self._reference = reference
        self._platform = platform
        self._left = _DOCUMENT_COUNT_LIMIT

    async def descend(self, index: Index, depth: int) -> _Found | None:
        """The best image for the platform below ``index``, None if there is none."""
        for entry in candidates(index, self._platform):
            data, document = await self._fetch(entry)
            if isinstance(document, Index):
                if depth >= _DEPTH_LIMIT:
                    raise RefusedError(
                        f"image {self._reference}: indexes nested deeper than {_DEPTH_LIMIT}"
                    )
                found = await self.descend(document, depth + 1)
            else:
                found = await self.load(entry.digest, data, document)
                if entry.platform is None and not self._fits(found.config):
                    found = None
            if found is not None:
                return found
        return None

    def _fits(self, config: ImageConfig) -> bool:
        return self._platform.rank(config.platform) is not None

    async def _fetch(self, entry: Descriptor) -> tuple[bytes, Index | Manifest]:
        what = f"manifest {self._reference.name}@{entry.digest}"
        self._left -= 1
        if self._left < 0:
            raise RefusedError(f"image {self._reference}: too many nested manifests")
        if entry.size_bytes > DOCUMENT_LIMIT_BYTES:
            raise RefusedError(f"{what}: longer than {DOCUMENT_LIMIT_BYTES} bytes")
        pinned = Reference(self._reference.registry, self._reference.repository, None, entry.digest)
        data = (await self._fetcher.manifest(pinned, entry.size_bytes)).data
        document = parse_manifest(data, entry.media_type, what)
        if isinstance(document, Index) != entry.is_index:
            raise RefusedError(f"{what}: it is not of the type that its index says")
        return data, document

    async def load(self, digest: Digest, data: bytes, manifest: Manifest) -> _Found:
        """The config that belongs to ``manifest``."""
        descriptor = manifest.config
        what = f"config {self._reference.name}@{descriptor.digest}"
        if descriptor.size_bytes > DOCUMENT_LIMIT_BYTES:
            raise RefusedError(f"{what}: longer than {DOCUMENT_LIMIT_BYTES} bytes")
        blob = BlobRef(self._reference.name, descriptor.digest, descriptor.size_bytes)
        config_data = await self._fetcher.document(blob)
        return _Found(digest, data, manifest, parse_config(config_data, what), config_data)


def _join(found: _Found, reference: Reference) -> tuple[LayerDescriptor, ...]:
    layers, diff_ids = found.manifest.layers, found.config.diff_ids
    if len(layers) != len(diff_ids):
        raise RefusedError(
            f"image {reference}: {len(layers)} layers in the manifest, "
            f"{len(diff_ids)} diffIDs in the config"
        )
    return tuple(
        LayerDescriptor(
            layer.digest, layer.size_bytes, layer.media_type, layer.annotations, diff_id
        )
        for layer, diff_id in zip(layers, diff_ids, strict=True)
    )
