"""`ember index` as CI uses it: build, sign, push, show, verify, pull, against a real socket."""

from __future__ import annotations

import json
import random
import signal
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from snapshotter.image import index_layout
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_layout import HEADER_BYTES
from snapshotter.indexes.artifact import ARTIFACT_TYPE, PLAIN_DIGEST
from tests.cases.images import (
    ImageCase,
    as_it_is,
    config_of,
    digest,
    entry_of,
    gzipped,
    image,
    index_of,
    manifest_of,
    zstandarded,
)
from tests.cases.tars import file, layer
from tests.fakes.http_server import Answer
from tests.fakes.registry import answer_with
from tests.fakes.served import in_a_thread, offered
from tests.fakes.writable import WritableRegistry
from tests.patience import until
from tests.unit.cli.conftest import LIMIT_S, Place

DATA = b"".join(random.Random(n).randbytes(90) + bytes(100) for n in range(8000))
BASE = gzipped(layer(file(b"base", DATA)))
OWN = zstandarded(layer(file(b"own", DATA[:100_000])))
PLAIN = as_it_is(layer(file(b"plain", b"x" * 3000)))
CASE = image("indexed", [BASE, OWN, PLAIN])
OTHER = image("other", [BASE, gzipped(layer(file(b"more", b"y" * 5000)))])


class Ci:
    """A CI user: a home of its own, a registry, a key."""

    def __init__(self, place: Place, registry: WritableRegistry) -> None:
        self._place = place
        self.registry = registry
        self.home = place.directory / "home"
        self.home.mkdir()
        self.key = place.directory / "key"
        assert self.ember("keygen", str(self.key)).exit_code == 0

    @property
    def public(self) -> str:
        return f"{self.key}.pub"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "ember" / "index"

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "XDG_CACHE_HOME": ""}

    def ember(self, *words: str) -> Any:
        return self._place.ember("index", *words, **self.environment)

    def told(self, *words: str) -> Any:
        """The JSON of a command that must succeed."""
        result = self.ember(*words, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def build(self, reference: str, *words: str) -> Any:
        """The only image that is built, signed."""
        (row,) = self.told("build", reference, "--sign", str(self.key), *words)["images"]
        return row

    def ways(self, row: Any) -> list[str]:
        return [one["how"] for one in row["layers"]]

    def blobs_read(self, case: ImageCase) -> list[str]:
        """Which layers of the image were asked for."""
        got = [seen.target for seen in self.registry.seen if seen.method == "GET"]
        return [name for name in case.stored if any(name in target for target in got)]


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


def test_layers_of_another_image_are_shared_and_mounted(quick: Ci) -> None:
    base = offered(quick.registry, OTHER)
    quick.build(base)
    reference = offered(quick.registry, CASE)
    quick.registry.seen.clear()
    row = quick.build(reference, "--cache", str(quick.home / "another"), "--reuse", base)
    assert quick.ways(row) == ["shared", "built", "built"]
    assert quick.registry.asked("mount=")
    assert quick.told("verify", reference, "--key", quick.public, "--deep")["ok"]


def test_reuse_takes_nothing_from_strangers(quick: Ci) -> None:
    base = offered(quick.registry, OTHER)
    quick.told("build", base)
    reference = offered(quick.registry, CASE)
    words = ["build", reference, "--sign", str(quick.key), "--reuse", base]
    result = quick.ember(*words)
    assert result.exit_code == 1
    assert "no index artifact that a trusted key signed" in result.stderr


def test_an_unsigned_artifact_is_named_and_not_trusted(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.told("build", reference)
    (shown,) = quick.told("show", reference, "--key", quick.public)["artifacts"]
    assert shown["trusted_key"] is None
    assert "not signed" in shown["why_not_trusted"]
    result = quick.ember("verify", reference, "--key", quick.public)
    assert result.exit_code == 1
    assert "signed by a trusted key" in result.stderr
    out = str(quick.home / "out")
    result = quick.ember("pull", reference, "--output", out, "--key", quick.public)
    assert result.exit_code == 1
    assert "no index artifact that may be trusted" in result.stderr
    pulled = quick.told("pull", reference, "--output", out, "--key", quick.public, "--unsigned")
    assert len(pulled["files"]) == 3


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
    (shown,) = quick.told("show", str(out))["artifacts"]
    assert (shown["artifact"], shown["signed"]) == (row["artifact"], True)
    listed = json.loads((out / "index.json").read_text())["manifests"]
    assert [entry["artifactType"] for entry in listed] == [ARTIFACT_TYPE]


def _bend_artifact(registry: WritableRegistry, repository: str, old: bytes, new: bytes) -> None:
    """Replace words in the artifact's manifest, and have the registry list the bent one."""
    found = registry.repository(repository)
    for name, (data, kind) in list(found.manifests.items()):
        if ARTIFACT_TYPE.encode() in data:
            assert old in data
            del found.manifests[name]
            registry.add_manifest(repository, data.replace(old, new), kind)


def test_a_signature_is_not_taken_along_to_another_image(quick: Ci) -> None:
    reference, other = (offered(quick.registry, case) for case in (CASE, OTHER))
    quick.build(reference)
    ours, theirs = (digest(case.documents[-1]).encode() for case in (CASE, OTHER))
    registry = quick.registry
    registry.repositories[OTHER.repository].blobs.update(
        registry.repositories[CASE.repository].blobs
    )
    for data, kind in list(registry.repositories[CASE.repository].manifests.values()):
        if ARTIFACT_TYPE.encode() in data:
            registry.add_manifest(OTHER.repository, data.replace(ours, theirs), kind)
    result = quick.ember("verify", other, "--key", quick.public)
    assert result.exit_code == 1
    assert "it was taken from another artifact" in result.stdout


def test_a_swapped_index_is_refused_by_its_signature(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.build(reference)
    found = quick.registry.repository(CASE.repository)
    artifact = next(d for d, _ in found.manifests.values() if ARTIFACT_TYPE.encode() in d)
    plain = json.loads(artifact)["layers"][0]["annotations"][PLAIN_DIGEST]
    _bend_artifact(quick.registry, CASE.repository, plain.encode(), digest(b"evil").encode())
    result = quick.ember("verify", reference, "--key", quick.public)
    assert result.exit_code == 1
    assert "the signature is for another index of layer" in result.stdout


def test_an_artifact_of_a_newer_version_is_called_so(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.build(reference)
    old = b"application/vnd.ember.layer.index.v2+zstd"
    _bend_artifact(quick.registry, CASE.repository, old, old.replace(b"v2", b"v3"))
    result = quick.ember("verify", reference, "--key", quick.public)
    assert result.exit_code == 1
    assert "of a newer version than this Ember reads" in result.stdout


def test_an_image_without_an_artifact_says_what_makes_one(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    assert "`ember index build` makes one" in quick.ember("show", reference).stdout
    for verb in (["verify", reference], ["pull", reference, "--output", str(quick.home / "out")]):
        result = quick.ember(*verb)
        assert result.exit_code == 1
        assert "`ember index build` makes one" in result.stderr


def test_who_may_not_push_is_told_so(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.registry.inject(answer_with(403), lambda seen: seen.method == "POST")
    result = quick.ember("build", reference)
    assert result.exit_code == 1
    assert "to push, the credential needs the right to" in result.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["build", "a/B"], "bad repository"),
        (["build", "example.org/x", "--platform", "linux"], "platform"),
        (["build", "example.org/x", "--source", "ftp:x"], "--source"),
        (["build", "example.org/x", "--sign", "/nonexistent"], "no such file"),
        (["verify", "example.org/x", "--key", "/nonexistent"], "no such file"),
        (["build", "example.org/x", "--cache", "/proc/x"], "index cache"),
    ],
)
def test_wrong_usage_is_told_at_once(quick: Ci, words: list[str], reason: str) -> None:
    result = quick.ember(*words)
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing_half(
    place: Place, quick: Ci, number: signal.Signals
) -> None:
    reference = offered(quick.registry, CASE)
    hung: list[Answer] = []

    def hang(_: object, answer: Answer) -> Answer:
        answer.cut_after, answer.cut = 20_000, "hang"
        hung.append(answer)
        return answer

    quick.registry.inject(hang, lambda seen: CASE.stored[0] in seen.target)
    with place.popen("index", "build", reference, environment=quick.environment) as command:
        assert until(lambda: bool(hung))
        command.send_signal(number)
        _, err = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 128 + number
    assert "Traceback" not in err
    left = {path.name for path in quick.cache.iterdir()}
    assert not [name for name in left if ".tmp-" in name or CASE.stored[0][7:] in name]


def test_a_lie_that_was_signed_is_found_by_looking_deep(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.told("build", reference, "--output", str(quick.home / "out"))
    path = quick.cache / f"{CASE.stored[0][7:]}.idx"
    data = path.read_bytes()
    header, body = index_layout.unpack_header(data, "it"), bytearray(data[HEADER_BYTES:])
    body[0] ^= 1  # a digest of the first chunk that is not its
    path.write_bytes(replace(header, body_digest=blake3(body).digest()).pack() + body)
    assert quick.ways(quick.build(reference)) == ["cached"] * 3
    assert quick.told("verify", reference, "--key", quick.public)["ok"]
    result = quick.ember("verify", reference, "--key", quick.public, "--deep")
    assert result.exit_code == 1
    assert f"layer {CASE.stored[0]} is not what it says: the digest of chunk 0" in result.stderr
