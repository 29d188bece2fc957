"""Small images put into a fake registry, made of whatever layers a test wants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from snapshotter.content import Digest
from snapshotter.oci.documents import OCI_CONFIG, OCI_INDEX, OCI_MANIFEST
from tests.fakes.registry import FakeRegistry, sha256

OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"


def dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def descriptor(data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": str(sha256(data)), "size": len(data), **more}


def config_of(layers: Sequence[bytes], os: str = "linux", architecture: str = "amd64") -> bytes:
    """The config of plain layers (their diffIDs are their digests)."""
    diff_ids = [str(sha256(layer)) for layer in layers]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    return dump({"os": os, "architecture": architecture, "rootfs": rootfs})


def manifest_of(config: bytes, layers: Sequence[bytes], /, **changes: Any) -> bytes:
    """The manifest of plain layers; ``changes`` replace its fields or add some."""
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor(config, OCI_CONFIG),
        "layers": [descriptor(layer, OCI_LAYER) for layer in layers],
    }
    return dump({**document, **changes})


def index_of(*entries: dict[str, Any]) -> bytes:
    return dump({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": list(entries)})


def push_image(
    registry: FakeRegistry,
    repository: str,
    layers: Sequence[bytes],
    *,
    tag: str | None = "latest",
    architecture: str = "amd64",
) -> tuple[Digest, bytes]:
    """Put an image of plain layers into the registry; its manifest's digest and bytes."""
    config = config_of(layers, architecture=architecture)
    for data in (config, *layers):
        registry.add_blob(repository, data)
    manifest = manifest_of(config, layers)
    return registry.add_manifest(repository, manifest, OCI_MANIFEST, tag), manifest
