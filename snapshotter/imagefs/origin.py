"""The registry as the decision and the documents need it: small questions, by digest."""

from __future__ import annotations

from contextlib import aclosing

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import RefusedError
from snapshotter.oci.documents import DOCUMENT_LIMIT_BYTES
from snapshotter.oci.reference import Reference, parse_reference
from snapshotter.oci.registry import RegistryClient


class RegistryOrigin:
    """Asks the registries that a reference names."""

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry

    async def check(self, reference: str, manifest: Digest) -> None:
        """Return if this node may read the image: its manifest, by digest, is asked for."""
        await self._registry.manifest(_pinned(reference, manifest))

    async def gives(self, blob: BlobRef) -> None:
        """Return if this node may read ``blob`` in its repository."""
        await self._registry.check(blob)

    async def manifest_bytes(self, reference: str, digest: Digest) -> bytes:
        """A manifest by digest, unverified: the caller checks it."""
        return (await self._registry.manifest(_pinned(reference, digest))).data

    async def config_bytes(self, reference: str, digest: Digest, size_bytes: int) -> bytes:
        """A config of the promised length, unverified: the caller checks its digest."""
        if size_bytes > DOCUMENT_LIMIT_BYTES:
            raise RefusedError(f"config {digest} is over {DOCUMENT_LIMIT_BYTES} bytes")
        blob = BlobRef(parse_reference(reference).name, digest, size_bytes)
        async with aclosing(self._registry.stream(blob)) as stream:
            return b"".join([part async for part in stream])


def _pinned(reference: str, digest: Digest) -> Reference:
    return parse_reference(reference).with_digest(digest)
