"""`ember index` as CI uses it: build, sign, push, show, verify, pull, against a real socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.image.index import LayerIndex
from snapshotter.indexes.artifact import ARTIFACT_TYPE
from tests.cases.images import (
    ImageCase,
    config_of,
    digest,
    entry_of,
    index_of,
    manifest_of,
)
from tests.fakes.registry import error
from tests.fakes.served import in_a_thread, offered
from tests.fakes.writable import WritableRegistry
from tests.unit.cli.conftest import LIMIT_S, ROOT, Place
from tests.unit.cli.index_scene import BASE, CASE, OTHER, OWN, PLAIN, Ci


@pytest.fixture(params=[True, False], ids=["api", "tag"])
def ci(place: Place, request: pytest.FixtureRequest) -> Iterator[Ci]:
    registry = WritableRegistry(api=request.param)
    with in_a_thread(registry):
        yield Ci(place, registry)


@pytest.fixture
def quick(place: Place) -> Iterator[Ci]:
    registry = WritableRegistry()
    with in_a_thread(registry):
        yield Ci(place, registry)


def test_what_is_built_is_found_verified_and_pulled(ci: Ci) -> None:
    reference = offered(ci.registry, CASE)
    row = ci.build(reference)
    assert ci.ways(row) == ["built"] * 3
    assert row["pushed"] and len(row["signed_by"]) == 1

    (shown,) = ci.told("show", reference, "--key", ci.public)["artifacts"]
    assert shown["trusted_key"] == row["signed_by"][0]
    assert shown["artifact"] == row["artifact"]
    assert [one["digest"] for one in shown["layers"]] == list(CASE.stored)
    verified = ci.told("verify", reference, "--key", ci.public, "--deep")
    assert verified["ok"] and verified["artifacts"][0]["faults"] == []

    out = ci.home / "out"
    pulled = ci.told("pull", reference, "--output", str(out), "--key", ci.public)
    indexes = [LayerIndex.open(Path(path)) for path in pulled["files"]]
    assert [str(index.layer) for index in indexes] == list(CASE.stored)
    for index in indexes:
        made = ci.cache / f"{index.layer.hex}.idx"
        assert bytes(index.data) == made.read_bytes()
    shown = ci.told("show", pulled["files"][0])
    assert shown["layer"] == CASE.stored[0]


def test_building_again_reads_no_layer_and_adds_nothing(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    first = quick.build(reference)
    quick.registry.seen.clear()
    again = quick.build(reference)
    assert again["artifact"] == first["artifact"]
    assert (quick.ways(again), again["new_bytes"]) == (["cached"] * 3, 0)
    assert quick.blobs_read(CASE) == []


def test_a_signed_artifact_saves_the_reading_where_there_is_no_cache(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    first = quick.build(reference)
    quick.registry.seen.clear()
    again = quick.build(reference, "--cache", str(quick.home / "another"))
    assert quick.ways(again) == ["shared"] * 3
    assert again["artifact"] == first["artifact"]
    assert quick.blobs_read(CASE) == []


@pytest.mark.parametrize("status", [404, 503])
def test_an_artifact_that_lost_a_blob_costs_the_reading_and_no_build(
    quick: Ci, status: int
) -> None:
    reference = offered(quick.registry, CASE)
    first = quick.build(reference)
    repository = quick.registry.repository(CASE.repository)
    document = json.loads(repository.manifests[first["artifact"]][0])
    lost = document["layers"][0]["digest"]
    quick.registry.inject(
        lambda seen, answer: error(status, "LOST"),
        lambda seen: seen.method == "GET" and lost in seen.target,
    )
    words = ["build", reference, "--sign", str(quick.key), "--cache", str(quick.home / "another")]
    result = quick.ember(*words, "--json")
    assert f"ember: layer {CASE.stored[0]}: http" in result.stderr  # in one line
    (again,) = json.loads(result.stdout)["images"]
    assert quick.ways(again) == ["built", "shared", "shared"]
    assert again["artifact"] == first["artifact"]


def test_layers_of_another_image_are_shared_and_mounted(quick: Ci) -> None:
    base = offered(quick.registry, OTHER)
    quick.build(base)
    reference = offered(quick.registry, CASE)
    quick.registry.seen.clear()
    row = quick.build(reference, "--cache", str(quick.home / "another"), "--reuse", base)
    assert quick.ways(row) == ["shared", "built", "built"]
    assert quick.registry.asked("mount=")
    assert quick.told("verify", reference, "--key", quick.public, "--deep")["ok"]


def test_a_rotation_signs_with_both_keys(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    new = quick.home / "new"
    assert quick.ember("keygen", str(new)).exit_code == 0
    row = quick.build(reference, "--sign", str(new))
    assert len(row["signed_by"]) == 2
    for key in (quick.public, f"{new}.pub"):
        assert quick.told("verify", reference, "--key", key)["ok"]


def _two_platforms() -> ImageCase:
    """An index of two images that share a layer, and an attestation."""
    configs = [config_of([BASE.diff_id, own.diff_id]) for own in (OWN, PLAIN)]
    configs[1] = config_of([BASE.diff_id, PLAIN.diff_id], architecture="arm64", variant="v8")
    manifests = [
        manifest_of(config, [BASE, own]) for config, own in zip(configs, (OWN, PLAIN), strict=True)
    ]
    proof = manifest_of(configs[0], [])
    note = {"vnd.docker.reference.type": "attestation-manifest"}
    top = index_of(
        entry_of(manifests[0], "linux/amd64"),
        entry_of(manifests[1], "linux/arm64/v8"),
        entry_of(proof, "unknown/unknown", annotations=note),
    )
    contents = (BASE.data, OWN.data, PLAIN.data, *configs)
    return replace(CASE, name="two", contents=contents, documents=(*manifests, proof, top))


def test_every_platform_gets_its_own_and_shares_layers(quick: Ci) -> None:
    reference = offered(quick.registry, _two_platforms())
    rows = quick.told("build", reference, "--platform", "all", "--sign", str(quick.key))["images"]
    assert [row["platform"] for row in rows] == ["linux/amd64", "linux/arm64"]
    assert [quick.ways(row) for row in rows] == [["built", "built"], ["cached", "built"]]
    for platform in ("linux/amd64", "linux/arm64"):
        words = ["verify", reference, "--platform", platform, "--key", quick.public]
        assert quick.told(*words)["ok"]
    for verb in ("show", "verify"):
        words = [verb, reference, "--platform", "all", "--key", quick.public]
        found = quick.told(*words)["artifacts"]
        assert [one["platform"] for one in found] == ["linux/amd64", "linux/arm64"]


def test_an_image_that_is_verified_for_all_platforms_needs_indexes_for_each(quick: Ci) -> None:
    reference = offered(quick.registry, _two_platforms())
    quick.build(reference, "--platform", "linux/amd64")
    result = quick.ember("verify", reference, "--platform", "all", "--key", quick.public)
    assert result.exit_code == 1
    assert f"{reference} for linux/arm64 has no index artifact" in result.stderr


def test_an_image_from_elsewhere_that_its_repository_lacks_is_told_of(quick: Ci) -> None:
    reference = offered(quick.registry, OTHER)
    _layout(quick.home / "layout", CASE)
    words = ["build", reference, "--source", f"oci:{quick.home / 'layout'}", "--push"]
    result = quick.ember(*words)
    assert result.exit_code == 0
    assert f"does not have image {digest(CASE.documents[-1])}" in result.stderr
    result = quick.ember("build", reference)
    assert "does not have" not in result.stderr


def _layout(directory: Path, case: ImageCase) -> None:
    (directory / "blobs" / "sha256").mkdir(parents=True)
    for data in (*case.contents, *case.documents):
        (directory / "blobs" / "sha256" / digest(data)[7:]).write_bytes(data)
    entry = {**entry_of(case.documents[-1]), "annotations": {_REF: "v1"}}
    (directory / "index.json").write_bytes(index_of(entry))


_REF = "org.opencontainers.image.ref.name"


@pytest.mark.parametrize("source", ["oci", "oci-archive", "containerd"])
def test_an_image_on_disk_is_indexed_without_its_registry(quick: Ci, source: str) -> None:
    folder = quick.home / "layout"
    words = [source, str(folder)]
    if source == "containerd":
        inner = folder / "io.containerd.content.v1.content"
        _layout(inner, CASE)
        (inner / "index.json").unlink()
        name = f"example.org/app@{digest(CASE.documents[-1])}"
    else:
        _layout(folder, CASE)
        name = "example.org/app:1"
        words.append("v1")
    if source == "oci-archive":
        words[1] = str(quick.home / "layout.tar")
        with tarfile.open(words[1], "w") as archive:
            archive.add(folder, ".")
    out = quick.home / "out"
    row = quick.build(name, "--source", ":".join(words), "--output", str(out))
    assert not row["pushed"]
    (shown,) = quick.told("show", str(out), "--key", quick.public)["artifacts"]
    assert (shown["artifact"], shown["signed"]) == (row["artifact"], True)
    assert [shown["trusted_key"]] == row["signed_by"]
    (shown,) = quick.told("show", str(out))["artifacts"]
    assert "no key that is trusted here" in shown["why_not_trusted"]
    listed = json.loads((out / "index.json").read_text())["manifests"]
    assert [entry["artifactType"] for entry in listed] == [ARTIFACT_TYPE]


def test_a_layout_that_has_its_indexes_in_it_holds_the_same_image(quick: Ci) -> None:
    folder = quick.home / "layout"
    _layout(folder, CASE)
    words = ["--source", f"oci:{folder}", "--output", str(folder), "--platform", "all"]
    rows = [quick.build("example.org/app:1", *words) for _ in range(2)]
    assert [quick.ways(row) for row in rows] == [["built"] * 3, ["cached"] * 3]
    assert rows[0]["artifact"] == rows[1]["artifact"]
    assert len(json.loads((folder / "index.json").read_text())["manifests"]) == 2


_AS_NOBODY = """
import os, sys
from snapshotter.cli import index_build, index_pull, index_verify, main  # whoever may read them
os.setgroups([]), os.setgid(65534), os.setuid(65534)
sys.argv[0] = "ember"
main.main()
"""


@pytest.mark.root
def test_who_is_not_root_builds_and_checks_without_a_daemon(quick: Ci, place: Place) -> None:
    reference = offered(quick.registry, CASE)
    for path in (quick.home, quick.key, Path(quick.public)):
        os.chown(path, 65534, 65534)
    environment = {**os.environ, **place.environment, **quick.environment, "PYTHONPATH": str(ROOT)}
    for words in (
        ["build", reference, "--sign", str(quick.key)],
        ["verify", reference, "--key", quick.public, "--deep"],
        ["pull", reference, "--key", quick.public, "--output", str(quick.home / "out")],
    ):
        done = subprocess.run(
            [sys.executable, "-B", "-c", _AS_NOBODY, "index", *words, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert (done.returncode, words[0]) == (0, words[0]), done.stderr
    assert (quick.cache / f"{CASE.stored[0][7:]}.idx").stat().st_uid == 65534
