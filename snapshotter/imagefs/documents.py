"""Manifest and config of an image that containerd is pulling, as the decision needs them.

containerd has both in its content store before it prepares the first layer, so no network is
needed; the registry is asked only where they are not there. Bytes count only if their digest fits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from snapshotter.content import Digest, chain_ids
from snapshotter.errors import CorruptError, EmberError, RefusedError
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.oci.manifest import Manifest, parse_config, parse_manifest
from snapshotter.oci.reference import parse_reference

log = logging.getLogger(__name__)

DOCUMENT_BYTES = 8 * 1024 * 1024


class ContentStore(Protocol):
    """Small blobs of containerd's content store."""

    async def read_blob(self, namespace: str, digest: Digest, limit_bytes: int) -> bytes: ...


class Registry(Protocol):
    """Small documents from the origin, by digest."""

    async def manifest_bytes(self, reference: str, digest: Digest) -> bytes: ...

    async def config_bytes(self, reference: str, digest: Digest, size_bytes: int) -> bytes: ...


class ContainerdDocuments:
    """Documents from containerd's content store, else from the registry."""

    def __init__(self, store: ContentStore, registry: Registry) -> None:
        self._store = store
        self._registry = registry

    async def image(self, namespace: str, manifest: Digest, reference: str) -> ImageDocument:
        """The layers of ``manifest``; RefusedError if manifest and config do not fit together."""
        what = f"manifest {manifest}"
        data = await self._read(
            namespace,
            manifest,
            reference,
            lambda: self._registry.manifest_bytes(reference, manifest),
        )
        parsed = parse_manifest(data, "", what)
        if not isinstance(parsed, Manifest):
            raise RefusedError(f"{what} is an index, not an image")
        wanted = parsed.config
        config_data = await self._read(
            namespace,
            wanted.digest,
            reference,
            lambda: self._registry.config_bytes(reference, wanted.digest, wanted.size_bytes),
        )
        config = parse_config(config_data, f"config {wanted.digest}")
        if len(config.diff_ids) != len(parsed.layers):
            raise RefusedError(
                f"{what} has {len(parsed.layers)} layers and its config {len(config.diff_ids)}"
                " diff IDs"
            )
        layers = tuple(
            Layer(layer.digest, diff_id, chain_id, layer.size_bytes)
            for layer, diff_id, chain_id in zip(
                parsed.layers, config.diff_ids, chain_ids(config.diff_ids), strict=True
            )
        )
        repository = parse_reference(reference).name if reference else ""
        return ImageDocument(manifest, reference, repository, layers)

    async def _read(
        self,
        namespace: str,
        digest: Digest,
        reference: str,
        otherwise: Callable[[], Awaitable[bytes]],
    ) -> bytes:
        try:
            data = await self._store.read_blob(namespace, digest, DOCUMENT_BYTES)
        except EmberError as error:
            log.info("%s is not to be had from containerd (%s): %s", digest, namespace, error)
            if not reference:
                raise
            data = await otherwise()
        if hashlib.new(digest.algorithm, data).hexdigest() != digest.hex:
            raise CorruptError(f"{digest}: its bytes do not have that digest")
        return data
