"""Which overlays stand on a layer: told by what the kernel lists of a mount, by names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ioengine.mounts import Mount
from snapshotter.imagefs.standing import container_at, stacks

LAYERS = {Path("/state/layers/ab"), Path("/root/snapshots/12/fs")}


def overlay(*options: str) -> Mount:
    place = Path("/run/task/rootfs")
    return Mount(64, 27, (0, 46), Path("/"), place, ("rw",), "overlay", "overlay", options)


@pytest.mark.parametrize(
    "options",
    [
        ("lowerdir=/root/snapshots/13/fs:/root/snapshots/12/fs",),
        ("lowerdir=13/fs:12/fs", "upperdir=/root/snapshots/15/fs", "workdir=/x"),
        ("lowerdir+=/root/snapshots/13/fs", "lowerdir+=/root/snapshots/12/fs"),
        ("lowerdir=/state/layers/ab", "upperdir=/elsewhere/fs"),
    ],
)
def test_an_overlay_on_a_layer_is_found(options: tuple[str, ...]) -> None:
    assert stacks(overlay(*options), LAYERS)


@pytest.mark.parametrize(
    "options",
    [
        ("lowerdir=/root/snapshots/13/fs:/root/snapshots/2/fs",),
        (
            "lowerdir=/other/snapshots/12/fs:/other/snapshots/11/fs",
            "upperdir=/other/snapshots/15/fs",
        ),
        ("lowerdir=/other/snapshots/12/fs",),
        ("lowerdir=13/fs:12/fs", "upperdir=/other/snapshots/15/fs", "workdir=/x"),
        ("lowerdir=13/fs:112/fs",),
        ("lowerdir=13/fs:12/fs",),  # not to be seen: the kernel is asked
        (),
    ],
)
def test_an_overlay_of_another_snapshotter_is_not_taken_for_one(options: tuple[str, ...]) -> None:
    assert not stacks(overlay(*options), LAYERS)


def test_a_container_is_named_as_containerd_s_path_to_its_root_names_it() -> None:
    task = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/c1/rootfs"
    assert container_at(task) == "k8s.io/c1"
    for other in ("/tmp/seen", "/rootfs", "/a/b/c/rootfs"):
        assert container_at(other) == other
