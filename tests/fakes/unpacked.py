"""Lazy layers that are not lazy: directories that lie ready, named by the layer's digest.

Lets a real containerd go the way of remote snapshots with nothing but links behind it. Each claim
is appended to ``claims.jsonl`` in the folder, so that a test can see what containerd said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from snapshotter.content import Digest
from snapshotter.snapshots.lazy import LayerClaim, LazyLayer, StackEntry
from snapshotter.snapshots.model import Usage


class UnpackedLayers:
    """Takes a layer if ``folder`` has a directory with its digest's hex as name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def claim(self, claim: LayerClaim) -> LazyLayer | None:
        said = {
            "namespace": claim.namespace,
            "chain_id": claim.chain_id,
            "parent": claim.parent,
            "image_ref": claim.image_ref,
            "manifest_digest": str(claim.manifest_digest),
            "layer_digest": str(claim.layer_digest),
            "image_layers": [str(layer) for layer in claim.image_layers],
            "diff_id": str(claim.diff_id),
            "below": [entry.chain_id for entry in claim.below],
        }
        with (self._folder / "claims.jsonl").open("a") as log:
            log.write(json.dumps(said) + "\n")
        layer = claim.layer_digest
        if layer is None or not (self._folder / layer.hex).is_dir():
            return None
        return LazyLayer(layer, claim.diff_id or layer)

    def is_fit(self, layer: Digest, view: Digest) -> bool:
        return True

    async def mount(self, stack: Sequence[StackEntry], wait_s: float) -> None:
        for entry in stack:
            if entry.layer is not None and not entry.directory.is_symlink():
                entry.directory.symlink_to(self._folder / entry.layer.hex)

    async def release(self, entry: StackEntry) -> None:
        entry.directory.unlink(missing_ok=True)

    async def usage(self, entry: StackEntry) -> Usage:
        return Usage(0, 0)
