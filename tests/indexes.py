"""Index artifacts as tests need them: made of index files, signed or not, right or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.content import Digest
from snapshotter.image.index import LayerIndex
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
        index = LayerIndex.open(path)
        plain = change(path.read_bytes())
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


def _content(data: bytes) -> Content:
    return Content(digest_of(data), len(data))
