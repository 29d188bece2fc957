"""Who stands on a layer's EROFS instance: the overlays and binds that show it.

Told by what the kernel lists of mounts, so by names: an overlay keeps what its names led to when it
was mounted, also if they lead elsewhere now. Who is to be found later is noted by the mount's
number that is never given twice. Containers are named as containerd's paths name them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ioengine import mounts

Holders = dict[str, int]
"""Where each mount is, and its number."""


def stacks(overlay: mounts.Mount, layers: Collection[Path]) -> bool:
    """Whether one of ``layers`` (N/fs in the snapshots' directory, or a mount point) surely is
    below it.

    Many lower directories are given by names like ``12/fs``, and from where is not to be seen.
    Other snapshotters have those too, but an upper directory is beside the lower ones. Of an
    overlay without one only the kernel knows, when a view's file is still open without our mounts.
    """
    options = [option.partition("=")[::2] for option in overlay.super_options]
    lower = [
        each for key, value in options if key.startswith("lowerdir") for each in value.split(":")
    ]
    uppers = [Path(value) for key, value in options if key == "upperdir"]
    for layer in layers:
        if str(layer) in lower:
            return True
        beside = bool(uppers) and uppers[0].parent.parent == layer.parent.parent
        if beside and f"{layer.parent.name}/{layer.name}" in lower:
            return True
    return False


def standing(
    there: Sequence[mounts.Mount], target: Path, layers: Collection[Path]
) -> list[mounts.Mount]:
    """The mounts that show what is mounted at ``target``; ``layers`` are the names that lead to
    it."""
    devices = {mount.device for mount in there if mount.target == target}
    return [
        mount
        for mount in there
        if (mount.device in devices and mount.target != target)
        or (mount.kind == "overlay" and stacks(mount, layers))
    ]


def noted(found: Sequence[mounts.Mount]) -> Holders:
    """What finds these mounts again; those that have gone meanwhile are left out."""
    numbers = {str(mount.target): _number(mount.target) for mount in found}
    return {target: number for target, number in numbers.items() if number is not None}


def still_there(holders: Mapping[str, int]) -> Holders:
    """Those of ``holders`` that are mounted still."""
    return {target: number for target, number in holders.items() if _number(Path(target)) == number}


def _number(target: Path) -> int | None:
    """Which mount is at ``target``; 0 for one that does not answer, which is there as long so."""
    try:
        return mounts.unique_id(target)
    except OSError:
        return 0


def container_at(target: str) -> str:
    """``namespace/id`` of the container whose root is mounted at ``target``, or else that path."""
    *_, runtime, namespace, container, name = ("", "", "", *Path(target).parts)
    if name == "rootfs" and runtime.startswith("io.containerd.runtime."):
        return f"{namespace}/{container}"
    return target
