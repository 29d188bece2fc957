"""A reference → one verified image: down through indexes to a manifest, its config, its layers.

Every document is held to the digest and length that named it. Nothing is fetched but what leads
to this platform's image. Knows the client only as something that can fetch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import CorruptError, InvalidArgumentError, NotFoundError, RefusedError
from snapshotter.oci.documents import (
    DOCUMENT_LIMIT_BYTES,
    Descriptor,
    check_content,
    digest_of,
)
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


class Fetcher(Protocol):
    """What resolving needs of a registry client."""

    async def manifest(self, reference: Reference) -> tuple[bytes, str, str | None]: ...

    def stream(self, blob: BlobRef) -> AsyncIterator[bytes]: ...


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
    data, content_type, told = await fetcher.manifest(reference)
    digest = _verify_top(data, reference, told)
    top = parse_manifest(data, content_type, f"manifest {reference}")
    search = _Search(fetcher, reference, platform)
    if isinstance(top, Index):
        found = await search.descend(top, 1)
        if found is None:
            raise NotFoundError(
                f"image {reference}: nothing for {platform}; it is offered for {offered(top)}"
            )
    else:
        found = await search.load(digest, data, top)
    return ResolvedImage(
        reference=reference,
        target_digest=digest,
        target_media_type=top.media_type,
        manifest_digest=found.digest,
        manifest_media_type=found.manifest.media_type,
        manifest=found.data,
        index=data if isinstance(top, Index) else None,
        config_digest=found.manifest.config.digest,
        config=found.config_data,
        layers=_join(found, reference),
        platform=found.config.platform if found.config.platform.os else platform,
    )


def _verify_top(data: bytes, reference: Reference, told: str | None) -> Digest:
    """The digest of the first document: held to the reference's, or to what the registry told."""
    what = f"manifest {reference}"
    if reference.digest is not None:
        check_content(data, reference.digest, what)
        return reference.digest
    if told is not None:
        try:
            digest = Digest.parse(told.strip())
        except InvalidArgumentError:
            raise CorruptError(f"{what}: Docker-Content-Digest {told[:100]!r} is none") from None
        check_content(data, digest, what)
        return digest
    return digest_of(data)


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
        data, _, _ = await self._fetcher.manifest(pinned)
        check_content(data, entry.digest, what, entry.size_bytes)
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
        config_data = b"".join([chunk async for chunk in self._fetcher.stream(blob)])
        check_content(config_data, descriptor.digest, what, descriptor.size_bytes)
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
