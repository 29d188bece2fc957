"""What `ember index` refuses, and that it leaves nothing half: lies, strangers, interrupts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from snapshotter.image import index_layout
from snapshotter.image.index_layout import HEADER_BYTES
from snapshotter.indexes.artifact import ARTIFACT_TYPE, PLAIN_DIGEST
from tests.cases.images import (
    digest,
)
from tests.fakes.http_server import Answer
from tests.fakes.registry import answer_with, flip
from tests.fakes.served import in_a_thread, offered
from tests.fakes.writable import WritableRegistry
from tests.patience import until
from tests.unit.cli.conftest import LIMIT_S, Place
from tests.unit.cli.index_scene import CASE, OTHER, Ci


@pytest.fixture
def quick(place: Place) -> Iterator[Ci]:
    registry = WritableRegistry()
    with in_a_thread(registry):
        yield Ci(place, registry)


def test_reuse_takes_nothing_from_strangers(quick: Ci) -> None:
    base = offered(quick.registry, OTHER)
    quick.told("build", base)
    reference = offered(quick.registry, CASE)
    words = ["build", reference, "--sign", str(quick.key), "--reuse", base]
    result = quick.ember(*words)
    assert result.exit_code == 1
    assert "no index artifact that a trusted key signed" in result.stderr


@pytest.mark.parametrize("name", ["a.idx", "./a", "../a", "/tmp/no/such"])
def test_a_path_that_is_not_there_is_asked_of_no_registry(quick: Ci, name: str) -> None:
    result = quick.ember("show", name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{name}: there is no such file" in result.stderr


def test_a_directory_of_containerd_wants_a_digest(quick: Ci) -> None:
    result = quick.ember("build", "example.org/app:1", "--source", f"containerd:{quick.home}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give the image with its digest" in result.stderr


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


@pytest.mark.parametrize("verb", ["pull", "build"])
def test_nothing_is_put_where_a_node_keeps_its_own(quick: Ci, verb: str) -> None:
    """Whatever lies there without a note counts as built by that node."""
    reference = offered(quick.registry, CASE)
    quick.told("build", reference)
    own = quick.home / "ember" / "index"
    own.mkdir(parents=True)
    (own.parent / "ember.db").touch()
    words = {"pull": ["--output", str(own), "--unsigned"], "build": ["--cache", str(own)]}
    result = quick.ember(verb, reference, *words[verb])
    assert result.exit_code != 0
    assert "a node keeps its own indexes there" in result.stderr
    assert list(own.iterdir()) == []


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


def test_a_pull_that_meets_a_lie_says_so_and_leaves_nothing(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.build(reference)
    found = quick.registry.repository(CASE.repository)
    artifact = next(d for d, _ in found.manifests.values() if ARTIFACT_TYPE.encode() in d)
    packed = json.loads(artifact)["layers"][0]["digest"]
    quick.registry.inject(flip(30), lambda seen: packed in seen.target)
    out = quick.home / "out"
    result = quick.ember("pull", reference, "--output", str(out), "--key", quick.public)
    assert result.exit_code == 1
    assert result.stderr.startswith("ember: ") and CASE.stored[0] in result.stderr
    assert not (out / f"{CASE.stored[0][7:]}.idx").exists()
    assert not [path for path in out.iterdir() if ".tmp-" in path.name]


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


def test_keys_that_cannot_be_trusted_are_told_of(quick: Ci) -> None:
    reference = offered(quick.registry, CASE)
    quick.build(reference)
    keys = quick.home / "keys"
    keys.mkdir()
    keys.chmod(0o777)
    config = quick.home / "config.toml"
    config.write_text(f'[index]\ntrusted_keys = "{keys}"\n')
    for verb in (["show"], ["verify"], ["pull", "--output", str(quick.home / "out")]):
        result = quick.ember(*verb, reference, "--config", str(config))
        assert result.stderr.count("others may write there") == 1, result.stderr


def test_a_folder_that_is_not_there_is_named(quick: Ci, tmp_path: Path) -> None:
    """As where a build's TMPDIR has gone."""
    reference = offered(quick.registry, CASE)
    quick.build(reference)
    words = ("verify", reference, "--key", quick.public)
    result = quick.ember(*words, TMPDIR=str(tmp_path / "gone"))
    assert result.exit_code == 1
    assert str(tmp_path / "gone") in result.stderr
