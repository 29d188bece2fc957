"""An artifact of two layers, made of nothing, and ways to bend it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from snapshotter.content import Digest
from snapshotter.indexes.artifact import Content, IndexArtifact, IndexedLayer, compose_artifact
from snapshotter.oci.documents import OCI_MANIFEST, Descriptor, digest_of
from snapshotter.oci.platform import Platform

IMAGE = Descriptor(OCI_MANIFEST, digest_of(b"the image"), 9)
OTHER = digest_of(b"another image")


def named(text: str) -> Digest:
    """A digest that nothing has but ``text``."""
    return digest_of(text.encode())


def layer(name: str, *, windows: bool = True) -> IndexedLayer:
    """An indexed layer that is not there."""
    return IndexedLayer(
        layer=named(name),
        diff_id=named(f"plain {name}"),
        packed=Content(named(f"packed {name}"), 700),
        plain=Content(named(f"index {name}"), 2048),
        windows=Content(named(f"windows {name}"), 5000) if windows else None,
    )


def artifact(envelope: Content | None = None) -> IndexArtifact:
    """Two layers, the second without windows."""
    layers = (layer("a"), layer("b", windows=False))
    return IndexArtifact(IMAGE, Platform.of("linux", "arm64"), layers, envelope)


def bent(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The artifact's manifest after ``change`` of its JSON."""
    document = json.loads(compose_artifact(artifact()))
    change(document)
    return json.dumps(document).encode()
