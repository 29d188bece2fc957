"""containerd's model of snapshots as values: kinds, infos, usages, mounts and the known labels.

Times are nanoseconds since the epoch: containerd compares them to the nanosecond, and floats lose
that. Nothing here knows how they are stored or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What may be done with a snapshot; the numbers are those of containerd's wire enum."""

    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3

    @property
    def word(self) -> str:
        """The kind as containerd's filters spell it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Info:
    """What Stat and List say of a snapshot; ``parent`` is "" where there is none."""

    name: str
    parent: str
    kind: Kind
    created_ns: int
    updated_ns: int
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one snapshot takes on disk, its parents not counted: allocated bytes and inodes."""

    size_bytes: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount(2) call, made by the client: type, source and fstab-like options."""

    type: str
    source: str
    options: tuple[str, ...]
