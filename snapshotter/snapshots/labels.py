"""The labels that containerd puts on snapshots, and the rules that every label must keep.

The names are part of containerd's public contract; what is not listed here is stored and returned
but means nothing to Ember.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from snapshotter.errors import InvalidArgumentError

SNAPSHOT_REF: Final = "containerd.io/snapshot.ref"
"""On Prepare of an image layer: the chainID that is going to be unpacked into it."""
IMAGE_REF: Final = "containerd.io/snapshot/cri.image-ref"
MANIFEST_DIGEST: Final = "containerd.io/snapshot/cri.manifest-digest"
LAYER_DIGEST: Final = "containerd.io/snapshot/cri.layer-digest"
IMAGE_LAYERS: Final = "containerd.io/snapshot/cri.image-layers"
"""This layer and those above it, comma-separated; cut where it would be longer than a label."""
DIFF_ID: Final = "containerd.io/snapshot/diff-id"
"""Since containerd 2.3."""

MAX_LABEL_BYTES: Final = 4096
_SHOWN = 64


def checked(labels: Mapping[str, str]) -> dict[str, str]:
    """A copy without empty values (to containerd they are absent).

    InvalidArgumentError for an empty key, or for key and value of over 4096 bytes together.
    """
    for key, value in labels.items():
        if not key:
            raise InvalidArgumentError(f"a label has no name (its value is {value[:_SHOWN]!r})")
        length_bytes = len(key.encode()) + len(value.encode())
        if length_bytes > MAX_LABEL_BYTES:
            raise InvalidArgumentError(
                f"label {key[:_SHOWN]!r} and its value have {length_bytes} bytes; "
                f"{MAX_LABEL_BYTES} are allowed"
            )
    return {key: value for key, value in labels.items() if value}
