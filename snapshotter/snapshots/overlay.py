"""Directories of a chain -> the mounts that show it, as containerd's own overlayfs gives them.

Pure. An active snapshot writes into ``fs`` of its directory and needs ``work`` beside it; what it
stands on is read-only below. overlayfs can't stack nothing on nothing, so a snapshot without a
parent, and a view of a single layer, are bind mounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snapshotter.snapshots.model import Kind, Mount


def mounts(
    kind: Kind, directory: Path, below: Sequence[Path], options: Sequence[str]
) -> tuple[Mount, ...]:
    """The mounts of an active snapshot or a view whose own directory is ``directory``.

    ``below`` are the layers it stands on, the lowest first; ``options`` are added to overlay
    mounts (``index=off`` where the kernel has it).
    """
    upper = directory / "fs"
    if not below:
        return (_bind(upper, "ro" if kind is Kind.VIEW else "rw"),)
    if kind is Kind.VIEW and len(below) == 1:
        return (_bind(below[0], "ro"),)
    writable = () if kind is Kind.VIEW else (f"workdir={directory / 'work'}", f"upperdir={upper}")
    lower = "lowerdir=" + ":".join(str(path) for path in reversed(below))
    return (Mount("overlay", "overlay", (*writable, lower, *options)),)


def kernel_options(parameters: Path = Path("/sys/module/overlay/parameters")) -> tuple[str, ...]:
    """Options that this kernel's overlayfs knows and that containerd uses.

    With the inode index on, a lower directory that was copied or unpacked anew is refused.
    """
    return ("index=off",) if (parameters / "index").exists() else ()


def _bind(source: Path, access: str) -> Mount:
    return Mount("bind", str(source), (access, "rbind"))
