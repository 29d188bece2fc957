"""One EROFS instance: what it is, who saw it when it was in doubt, and the record beside its mount.

Mounts outlive the daemon; the record tells the next one what a mount is made of.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from snapshotter.content import Digest
from snapshotter.image.erofs_format import LAYER_NAME
from snapshotter.imagefs.standing import Holders


@dataclass(slots=True)
class Mounted:
    """One EROFS instance: where, and what it is made of.

    ``suspect``: it may have shown zeros, to ``holders`` among others (standing.py).
    """

    key: str
    target: Path
    layer: Digest
    view: Digest
    guarded: bool
    suspect: bool = False
    holders: Holders = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The layer's own root: a directory inside, not there when nothing is mounted."""
        return self.target / os.fsdecode(LAYER_NAME)

    @property
    def name(self) -> str:
        """The key that finds it; a suspect one is found by nobody who wants to mount."""
        return f"{self.key} (suspect {self.target.name})" if self.suspect else self.key


def encode(mounted: Mounted) -> str:
    """The text of its record."""
    fields = asdict(mounted)
    fields.update(layer=str(mounted.layer), view=str(mounted.view), target=str(mounted.target))
    return json.dumps(fields)


def decode(text: str, target: Path) -> Mounted:
    """The instance at ``target`` that a record speaks of; raises whatever a bad text leads to."""
    fields = json.loads(text)
    return Mounted(
        fields["key"],
        target,
        Digest.parse(fields["layer"]),
        Digest.parse(fields["view"]),
        bool(fields["guarded"]),
        bool(fields.get("suspect", False)),
        dict(fields.get("holders", {})),
    )
