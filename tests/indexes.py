"""Index artifacts as tests need them: made of index files, signed or not, right or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from blake3 import blake3

from snapshotter.chunks.verify import DIGEST_BYTES
from snapshotter.content import Digest
from snapshotter.image import erofs_format
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_layout import HEADER_BYTES, unpack_header
from snapshotter.image.scan import device_tag
from snapshotter.image.tree import Kind
from snapshotter.indexes.artifact import (
    ARTIFACT_TYPE,
    EMPTY,
    Content,
    IndexArtifact,
    IndexedLayer,
    compose_artifact,
)
from snapshotter.indexes.keys import SigningKey
from snapshotter.indexes.packing import pack
from snapshotter.indexes.trust import sign
from snapshotter.oci.documents import OCI_INDEX, OCI_MANIFEST, Descriptor, digest_of
from snapshotter.oci.platform import host_platform
from snapshotter.oci.referrers import fallback_tag
from tests.fakes.registry import FakeRegistry

Change = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class MadeArtifact:
    """An artifact's manifest and its blobs."""

    manifest: bytes
    blobs: tuple[bytes, ...]

    @property
    def digest(self) -> Digest:
        return digest_of(self.manifest)


def artifact_of(
    manifest: bytes,
    indexes: Sequence[Path],
    *,
    keys: Sequence[SigningKey] = (),
    change: Change = bytes,
) -> MadeArtifact:
    """The artifact of an image's ``manifest`` from its index files, ``change``d on the way."""
    layers, blobs = [], [EMPTY]
    for path in indexes:
        plain = change(path.read_bytes())
        index = LayerIndex(memoryview(plain), None, where=str(path), verify=False)
        packed = pack(plain)
        windows = path.with_suffix(".win")
        stored = windows.read_bytes() if windows.exists() else b""
        blobs += [packed, *([stored] if stored else [])]
        layers.append(
            IndexedLayer(
                index.layer,
                index.diff_id,
                _content(packed),
                _content(plain),
                _content(stored) if stored else None,
            )
        )
    image = Descriptor(OCI_MANIFEST, digest_of(manifest), len(manifest))
    made = IndexArtifact(image, host_platform(), tuple(layers))
    if keys:
        envelope = sign(made, keys)
        blobs.append(envelope)
        made = IndexArtifact(image, made.platform, made.layers, _content(envelope))
    return MadeArtifact(compose_artifact(made), tuple(blobs))


def offer(
    registry: FakeRegistry, repository: str, image: Digest, made: Sequence[MadeArtifact]
) -> None:
    """Have ``made`` lie beside ``image``, listed under the tag that old registries have for it."""
    entries = []
    for one in made:
        for blob in one.blobs:
            registry.add_blob(repository, blob)
        digest = registry.add_manifest(repository, one.manifest, OCI_MANIFEST)
        entries.append(
            {
                "mediaType": OCI_MANIFEST,
                "digest": str(digest),
                "size": len(one.manifest),
                "artifactType": ARTIFACT_TYPE,
            }
        )
    listed = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    registry.add_manifest(repository, json.dumps(listed).encode(), OCI_INDEX, fallback_tag(image))


def with_set_uid(plain: bytes) -> bytes:
    """An index that is sound, and says of the layer's files that they run as their owner."""
    index = LayerIndex(memoryview(plain), None, where="a lie")
    tree = ErofsReader(index.erofs, entries=index.entry_count).tree()
    for inode in tree.root.children.values():
        if inode.kind is Kind.FILE:
            inode.mode |= 0o4000
    image = write_erofs(tree, device_bytes=index.view_bytes, device_tag=device_tag(index.diff_id))
    return _with_image(plain, image)


def _with_image(plain: bytes, image: bytes) -> bytes:
    header = unpack_header(plain, "another's")
    body = plain[HEADER_BYTES : header.erofs_offset] + image
    digest = blake3(body).digest()
    return replace(header, erofs_bytes=len(image), body_digest=digest).pack() + body


def laid_out_otherwise(plain: bytes) -> bytes:
    """The same index as an Ember might have written it that lays inodes out in another way."""
    index = LayerIndex(memoryview(plain), None, where="another's")
    reader = ErofsReader(index.erofs, entries=index.entry_count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(erofs_format, "FLAT_BYTES", 2**62)
        image = reader.rewritten(reader.tree())
    assert image != bytes(index.erofs)
    return _with_image(plain, image)


def with_wrong_chunks(plain: bytes, number: int = 0) -> bytes:
    """An index that is sound, and wrong about what one chunk of the layer is."""
    header = unpack_header(plain, "a lie")
    at = DIGEST_BYTES * (number % header.chunk_count)
    table = bytearray(plain[HEADER_BYTES:])
    table[at] ^= 1
    body = bytes(table)
    return replace(header, body_digest=blake3(body).digest()).pack() + body


def for_layer(plain: bytes, layer: Digest, diff_id: Digest) -> bytes:
    """An index that is right about other bytes, made out to be of this layer."""
    index = LayerIndex(memoryview(plain), None, where="a lie")
    tree = ErofsReader(index.erofs, entries=index.entry_count).tree()
    image = write_erofs(tree, device_bytes=index.view_bytes, device_tag=device_tag(diff_id))
    header = unpack_header(plain, "a lie")
    body = plain[HEADER_BYTES : header.erofs_offset] + image
    digest = blake3(body).digest()
    return replace(header, layer=layer, diff_id=diff_id, body_digest=digest).pack() + body


def _content(data: bytes) -> Content:
    return Content(digest_of(data), len(data))
