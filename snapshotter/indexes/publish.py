"""An image's indexes → an artifact, in a registry or in an OCI layout on disk.

Blobs first, the manifest last: what can be seen is whole. The same indexes make the same artifact,
so publishing again, or beside another builder, adds nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from ioengine.directories import sync_directory
from snapshotter.content import Digest
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_writer import Writing, temporary_name
from snapshotter.indexes.artifact import (
    ARTIFACT_TYPE,
    EMPTY,
    Content,
    IndexArtifact,
    IndexedLayer,
    compose_artifact,
)
from snapshotter.indexes.keys import SigningKey
from snapshotter.indexes.layouts import INDEX_JSON
from snapshotter.indexes.packing import pack
from snapshotter.indexes.trust import sign
from snapshotter.oci.attaching import attach
from snapshotter.oci.documents import (
    DOCUMENT_LIMIT_BYTES,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    digest_of,
    objects,
    parse_object,
)
from snapshotter.oci.platform import Platform
from snapshotter.oci.pushing import Body, BytesBody, Pusher
from snapshotter.oci.reference import Reference, split_name
from snapshotter.oci.resolver import ResolvedImage
from snapshotter.tasks import together

_AT_ONCE = 3
_PIECE_BYTES = 1024 * 1024


class Target(Protocol):
    """Where an artifact goes."""

    async def blob(self, digest: Digest, body: Body, mount_from: str | None = None) -> bool:
        """Have the blob there; False if it was there already."""
        ...

    async def manifest(self, data: bytes, entry: Descriptor) -> None:
        """Put the artifact's manifest, so that who looks for the image's referrers finds it."""
        ...


@dataclass(frozen=True, slots=True)
class FileBody:
    """A Body in a file that nobody changes."""

    path: Path
    size_bytes: int

    def read(self, offset: int, length: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(length)


@dataclass(frozen=True, slots=True)
class Subject:
    """The image that the indexes are of. ``name`` is its registry and repository."""

    name: str
    manifest: Descriptor
    platform: Platform

    @classmethod
    def of(cls, image: ResolvedImage) -> Subject:
        size = len(image.manifest)
        manifest = Descriptor(image.manifest_media_type, image.manifest_digest, size)
        return cls(image.reference.name, manifest, image.platform)

    @property
    def reference(self) -> Reference:
        """The image, pinned."""
        return Reference(*split_name(self.name), None, self.manifest.digest)


@dataclass(frozen=True, slots=True)
class LocalIndex:
    """An index on disk and its windows file, None where it needs none. ``repository``: another
    one, as ``registry/name``, that has the blobs already."""

    index: LayerIndex
    windows: Path | None
    repository: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """What was published. ``new_bytes``: of blobs that were not there before."""

    artifact: IndexArtifact
    digest: Digest
    new_bytes: int
    key_ids: tuple[str, ...]


async def publish(
    image: Subject, indexes: Sequence[LocalIndex], keys: Sequence[SigningKey], target: Target
) -> Published:
    """Publish the ``indexes`` of ``image``, one for each distinct layer, signed by ``keys``.

    Raises as the target does.
    """
    done = await together(
        [partial(_publish_layer, one, image, target) for one in indexes], _AT_ONCE
    )
    artifact = IndexArtifact(image.manifest, image.platform, tuple(layer for layer, _ in done))
    if keys:
        envelope = sign(artifact, keys)
        artifact = replace(
            artifact,
            envelope=Content(digest_of(envelope), len(envelope)),
            signers=tuple(key.key_id for key in keys),
        )
        await target.blob(digest_of(envelope), BytesBody(envelope))
    await target.blob(digest_of(EMPTY), BytesBody(EMPTY))
    data = compose_artifact(artifact)
    entry = Descriptor(
        OCI_MANIFEST,
        digest_of(data),
        len(data),
        annotations=artifact.annotations,
        artifact_type=ARTIFACT_TYPE,
    )
    await target.manifest(data, entry)
    new_bytes = sum(sent for _, sent in done)
    return Published(artifact, entry.digest, new_bytes, tuple(key.key_id for key in keys))


async def _publish_layer(
    built: LocalIndex, image: Subject, target: Target
) -> tuple[IndexedLayer, int]:
    """The layer's entry, its blobs being there, and how many bytes of them are new."""
    index = built.index
    packed = await asyncio.to_thread(pack, index.data)
    packed_digest = await asyncio.to_thread(digest_of, packed)
    plain = await asyncio.to_thread(hashlib.sha256, index.data)
    windows, sent = None, 0
    mount_from = _repository(built, image)
    if await target.blob(packed_digest, BytesBody(packed), mount_from):
        sent += len(packed)
    if built.windows is not None:
        windows = await asyncio.to_thread(content_of, built.windows)
        if await target.blob(
            windows.digest, FileBody(built.windows, windows.size_bytes), mount_from
        ):
            sent += windows.size_bytes
    entry = IndexedLayer(
        layer=index.layer,
        diff_id=index.diff_id,
        packed=Content(packed_digest, len(packed)),
        plain=Content(Digest("sha256", plain.hexdigest()), len(index.data)),
        windows=windows,
    )
    return entry, sent


def _repository(built: LocalIndex, image: Subject) -> str | None:
    """Another repository of the same registry that has the layer's blobs, to mount them from."""
    if not built.repository or built.repository == image.name:
        return None
    registry, repository = split_name(built.repository)
    return repository if registry == split_name(image.name)[0] else None


def content_of(path: Path) -> Content:
    """Digest and length of a file."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return Content(Digest("sha256", digest.hexdigest()), size)


class RegistryTarget:
    """The repository of the image itself."""

    def __init__(self, pusher: Pusher, image: Subject) -> None:
        self._pusher = pusher
        self._image = image.reference

    async def blob(self, digest: Digest, body: Body, mount_from: str | None = None) -> bool:
        return await self._pusher.blob(digest, body, mount_from)

    async def manifest(self, data: bytes, entry: Descriptor) -> None:
        await attach(self._pusher, self._image, data, entry)


class LayoutTarget:
    """An OCI layout in a directory, which may hold other artifacts already."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with Writing(directory):
            (directory / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)

    async def blob(self, digest: Digest, body: Body, mount_from: str | None = None) -> bool:
        path = self._directory / "blobs" / digest.algorithm / digest.hex
        if path.exists():
            return False
        await asyncio.to_thread(_write, path, body)
        return True

    async def manifest(self, data: bytes, entry: Descriptor) -> None:
        await self.blob(entry.digest, BytesBody(data))
        await asyncio.to_thread(self._list, entry)

    def _list(self, entry: Descriptor) -> None:
        path = self._directory / INDEX_JSON
        with Writing(path):
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX)
                _write(self._directory / "oci-layout", BytesBody(b'{"imageLayoutVersion":"1.0.0"}'))
                _write(path, BytesBody(_listing(path, entry)))
            finally:
                os.close(directory)


def _listing(path: Path, entry: Descriptor) -> bytes:
    """The layout's index.json with ``entry`` in it."""
    document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    if path.exists():
        document = parse_object(path.read_bytes()[: DOCUMENT_LIMIT_BYTES + 1], str(path))
    entries = objects(document, "manifests", str(path))
    if all(known.get("digest") != str(entry.digest) for known in entries):
        entries = [*entries, entry.listed]
    return json.dumps({**document, "manifests": entries}).encode()


def _write(path: Path, body: Body) -> None:
    """Write a file whole or not at all."""
    temporary = temporary_name(path)
    try:
        with Writing(path), open(temporary, "xb") as file:
            for offset in range(0, body.size_bytes, _PIECE_BYTES):
                file.write(body.read(offset, min(_PIECE_BYTES, body.size_bytes - offset)))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
