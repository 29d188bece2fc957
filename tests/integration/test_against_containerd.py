"""The written truths of the handmade layers against what containerd's own overlayfs makes of them.

So a truth can't be a private opinion: where containerd shows something else, or can't unpack the
layer at all, that is listed here, path by path, with the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.bed.link import Shape
from bench.bed.process import BedError
from ioengine.mounts import unmount
from tests.cases.layers import in_one_layer
from tests.cases.rows import LayerCase
from tests.cases.stacks import of_several_layers
from tests.fakes.images import config_of, manifest_of
from tests.fakes.registry import sha256
from tests.layerstack import mount_overlay
from tests.treecheck import CONTAINERD_DEPARTURES, Rows, compare, walk

pytestmark = [pytest.mark.root, pytest.mark.containerd]

ATTEMPTS = 5
CASES = [*in_one_layer(), *of_several_layers()]

CANNOT_UNPACK = {
    "links to later entries": "no such file or directory",
    "many xattrs": "no space left on device",
    "old sparse files": "unhandled tar header type",
    "contiguous": "unhandled tar header type",
    "a global header without records": "invalid tar header",
    "blocked parents": "too many links",
    "whiteouts of their own layer": "not a directory",
}
"""Layers that containerd gives up on, with what it says; all of them are well-formed."""

SHOWS_OTHERWISE = {
    # It applies the attributes of a link's entry to the file, and chown drops the capability.
    "hard links": {"cap", "cap2"},
    # A global header between an extended header and its entry makes it forget the former.
    "global headers": {"f"},
    # Whiteouts that hide nothing stay, and are listed where only one layer has the directory.
    "whiteouts of nothing": {"var/lib/ghost"},
    "opaque": {"both/x", "both/y"},
    # overlayfs takes no notice of an opaque root.
    "opaque root": {"d/old", "f", "gone"},
}
"""Paths that containerd shows otherwise than the tar and image-spec's layer.md have it."""


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with Bed(Shape(0), cache=tmp_path_factory.mktemp("cache")) as bed:
        yield bed.containerd()


def archive(name: str, plains: list[bytes]) -> bytes:
    """An OCI layout in a tar, as `ctr images import` takes it."""
    config = config_of(plains, architecture=machine())
    manifest = manifest_of(config, plains)
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": str(sha256(manifest)),
        "size": len(manifest),
        "annotations": {"io.containerd.image.name": name},
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
    }
    files |= {f"blobs/sha256/{sha256(data).hex}": data for data in (config, manifest, *plains)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def machine() -> str:
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def chain_id(plains: list[bytes]) -> str:
    chain = str(sha256(plains[0]))
    for plain in plains[1:]:
        chain = str(sha256(f"{chain} {sha256(plain)}".encode()))
    return chain


def unpacked(containerd: Containerd, case: LayerCase, scratch: Path) -> Rows:
    """What containerd's overlayfs shows of the layers (and an empty one, so that it is overlay)."""
    key = re.sub(r"\W+", "-", case.name)
    plains = [*case.layers, bytes(1024)]
    file = scratch / "image.tar"
    file.write_bytes(archive(f"case.test/{key}:1", plains))
    containerd.ctr("images", "import", "--snapshotter", "overlayfs", file)
    snapshots = ["snapshots", "--snapshotter", "overlayfs"]
    said = ""
    for attempt in range(ATTEMPTS):  # the collector may take the view before it is asked about
        containerd.ctr(*snapshots, "view", f"{key}-{attempt}", chain_id(plains))
        with contextlib.suppress(BedError):
            said = containerd.ctr(*snapshots, "mounts", "/nowhere", f"{key}-{attempt}")
            break
    lower = re.search(r"lowerdir=([^,\s]+)", said)
    assert lower, said
    target = scratch / "merged"
    target.mkdir()
    mount_overlay(lower[1].split(":"), target)
    try:
        return walk(target)
    finally:
        unmount(target, detach=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_containerd_shows_the_same_but_for_what_is_listed(
    case: LayerCase, containerd: Containerd, tmp_path: Path
) -> None:
    if case.name in CANNOT_UNPACK:
        with pytest.raises(BedError, match=CANNOT_UNPACK[case.name]):
            unpacked(containerd, case, tmp_path)
        return
    differences = compare(case.rows, unpacked(containerd, case, tmp_path), CONTAINERD_DEPARTURES)
    paths = {line.split("'")[1] for line in differences}
    assert paths == SHOWS_OTHERWISE.get(case.name, set()), differences
