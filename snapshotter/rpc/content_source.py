"""containerd's content store as a source of images, through its socket. Read only.

What containerd has fetched is held to digest and length here again, as from any source.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import CorruptError, InvalidArgumentError, NotFoundError
from snapshotter.oci.documents import DOCUMENT_LIMIT_BYTES, check_content
from snapshotter.oci.reference import Reference
from snapshotter.oci.resolver import FetchedManifest
from snapshotter.rpc.containerd import Containerd


class ContentSource:
    """The images of one namespace."""

    def __init__(self, containerd: Containerd, namespace: str) -> None:
        self._containerd = containerd
        self._namespace = namespace

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest:
        digest = reference.digest or await self._target(reference)
        data = await self._containerd.read_blob(self._namespace, digest, DOCUMENT_LIMIT_BYTES)
        check_content(data, digest, f"manifest {reference} in containerd", size_bytes)
        return FetchedManifest(data, digest, "")

    async def document(self, blob: BlobRef) -> bytes:
        data = await self._containerd.read_blob(self._namespace, blob.digest, DOCUMENT_LIMIT_BYTES)
        check_content(data, blob.digest, f"{blob.digest} in containerd", blob.size_bytes)
        return data

    async def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        size = await self._containerd.blob_size(self._namespace, blob.digest)
        if size != blob.size_bytes:
            raise CorruptError(
                f"{blob.digest} in containerd is {size} bytes long, not {blob.size_bytes}"
            )
        parts = self._containerd.stream_blob(self._namespace, blob.digest)
        async with aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                yield part

    async def _target(self, reference: Reference) -> Digest:
        """The digest that containerd's image of this name has."""
        for record in await self._containerd.image_records(self._namespace):
            if record.name == str(reference):
                try:
                    return Digest.parse(record.target)
                except InvalidArgumentError:
                    break
        raise NotFoundError(
            f"containerd has no image {reference} in namespace {self._namespace}; "
            "`ctr images ls` lists what it has"
        )
