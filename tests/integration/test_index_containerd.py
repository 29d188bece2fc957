"""Indexes built from what a real containerd has fetched: by its socket, and from its directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.bed.containerd import CONFIG_1
from bench.bed.process import run
from snapshotter.indexes.layouts import REF_NAME
from tests.cases.images import digest, entry_of, gzipped, image, index_of, zstandarded
from tests.cases.tars import file, layer
from tests.patience import until

pytestmark = [pytest.mark.root, pytest.mark.containerd]

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
NAME = "registry.example/team/app:1"
LAYERS = [gzipped(layer(file(b"a", b"some bytes" * 9000))), zstandarded(layer(file(b"b", b"x")))]
CASE = image("in containerd", LAYERS)


@pytest.fixture
def containerd(tmp_path: Path) -> Iterator[Path]:
    """The folder of a containerd, Debian's 1.x, that has the image and nothing unpacked."""
    address = tmp_path / "c.sock"
    (tmp_path / "containerd.toml").write_text(
        CONFIG_1.format(root=tmp_path / "root", state=tmp_path / "state", address=address)
    )
    words = ["containerd", "--config", str(tmp_path / "containerd.toml")]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as server:
        try:
            ctr = ["ctr", "--address", str(address)]
            assert until(
                lambda: subprocess.run([*ctr, "version"], capture_output=True).returncode == 0
            )
            run([*ctr, "images", "import", "--no-unpack", _archive(tmp_path)])
            yield tmp_path
        finally:
            server.terminate()


def _answers(ctr: list[str]) -> bool:
    return subprocess.run([*ctr, "version"], capture_output=True).returncode == 0


def _archive(folder: Path) -> Path:
    """The image as `docker buildx` writes one: an OCI layout in a tar."""
    blobs = folder / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for data in (*CASE.contents, *CASE.documents):
        (blobs / digest(data)[7:]).write_bytes(data)
    notes = {REF_NAME: NAME, "io.containerd.image.name": NAME}
    entry = entry_of(CASE.documents[-1], annotations=notes)
    (folder / "layout" / "index.json").write_bytes(index_of(entry))
    (folder / "layout" / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    with tarfile.open(folder / "layout.tar", "w") as archive:
        archive.add(folder / "layout", ".")
    return folder / "layout.tar"


def _build(folder: Path, name: str, source: str) -> Any:
    config = folder / "ember.toml"
    config.write_text(f'[containerd]\naddress = "{folder}/c.sock"\n')
    words = ["index", "build", name, "--source", source, "--output", str(folder / "out"), "--json"]
    own = {"HOME": str(folder), "EMBER_CONFIG": str(config), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-B", "-m", "snapshotter.cli.main", *words],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["images"][0]


def test_what_containerd_has_is_indexed_from_there(containerd: Path) -> None:
    by_socket = _build(containerd, NAME, "containerd")
    assert [one["how"] for one in by_socket["layers"]] == ["built"] * len(LAYERS)
    pinned = f"registry.example/team/app@{digest(CASE.documents[-1])}"
    by_directory = _build(containerd, pinned, f"containerd:{containerd}/root")
    assert by_directory["artifact"] == by_socket["artifact"]
    listed = json.loads((containerd / "out" / "index.json").read_text())["manifests"]
    assert [entry["digest"] for entry in listed] == [by_socket["artifact"]]
