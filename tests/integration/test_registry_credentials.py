"""The whole daemon with credentials from files and programs, while they come and go.

Every password has colons in it: the first one ends the user's name, the others are the password's.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest

from tests.cases.images import digest, gzipped, image
from tests.cases.tars import file, layer
from tests.fakes.gates import BasicGate, TokenGate
from tests.fakes.http_server import Seen
from tests.fakes.registry import FakeRegistry, answer_with
from tests.integration.registry_scene import MISS_S, Scene, noise_blobs, noisy, read_all, scene_in
from tests.node import words_of
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

USER, PASSWORD = "someone", "pass:word:::"
FILE, HELPER, PLUGIN = "127.0.0.2:5002", "127.0.0.3:5003", "127.0.0.4:5004"
"""Registries by the source that knows their credentials."""
PATIENT_S = 15.0
API = "credentialprovider.kubelet.k8s.io/v1"


def write_docker_config(folder: Path, password: str = PASSWORD, server: str = FILE) -> None:
    pair = base64.b64encode(f"{USER}:{password}".encode()).decode()
    document = {"auths": {server: {"auth": pair}}, "credHelpers": {HELPER: "shelf"}}
    fresh = folder / "config.new"
    fresh.write_text(json.dumps(document))
    fresh.replace(folder / "config.json")


def write_program(path: Path, answer: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
    path.chmod(0o755)


def write_sources(folder: Path) -> str:
    """All three; returns the lines for the daemon's configuration."""
    write_docker_config(folder)
    write_program(folder / "bin/docker-credential-shelf", {"Username": USER, "Secret": PASSWORD})
    auth = {PLUGIN: {"username": USER, "password": PASSWORD}}
    kind = "CredentialProviderResponse"
    answer = {"apiVersion": API, "kind": kind, "cacheKeyType": "Registry", "auth": auth}
    write_program(folder / "plugins/provider", answer)
    provider = {"name": "provider", "matchImages": [PLUGIN], "defaultCacheDuration": "10m"}
    providers = {
        "apiVersion": "kubelet.config.k8s.io/v1",
        "kind": "CredentialProviderConfig",
        "providers": [{**provider, "apiVersion": API}],
    }
    (folder / "providers.json").write_text(json.dumps(providers))
    return (
        f'docker_config = ["{folder}/config.json"]\n'
        f'credential_provider_config = "{folder}/providers.json"\n'
        f'credential_provider_bin_dir = "{folder}/plugins"\n'
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("credentials")


@pytest.fixture(scope="module")
def scene(folder: Path) -> Iterator[Scene]:
    path = f"{folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with scene_in(folder, write_sources, environment={"PATH": path}) as made:
        yield made


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("patient")
    with scene_in(folder, write_sources, miss_s=PATIENT_S) as made:
        yield made


@pytest.fixture
def private(scene: Scene, folder: Path) -> Iterator[FakeRegistry]:
    """A registry whose credentials are in the docker config."""
    write_docker_config(folder)
    with at(scene, FILE) as registry:
        yield registry


def at(scene: Scene, authority: str) -> AbstractContextManager[FakeRegistry]:
    address, _, port = authority.partition(":")
    return scene.registries.another(address, int(port))


@pytest.mark.parametrize("source", [FILE, HELPER, PLUGIN], ids=["file", "helper", "plugin"])
def test_a_password_with_colons_is_let_in_whoever_knows_it(scene: Scene, source: str) -> None:
    with at(scene, source) as registry:
        registry.gate = BasicGate({USER: PASSWORD})
        case = noisy(f"colons {source}")
        scene.lazily(case, registry)
        with scene.node.mounted(case.chain_id) as root:
            assert read_all(scene, case, root) == ["", ""]
    assert "fork" not in scene.node.ember.log()  # of a program that was started beside calls


def test_an_image_without_credentials_is_refused_in_words_that_say_who_was_asked(
    scene: Scene, private: FakeRegistry, folder: Path
) -> None:
    private.gate = BasicGate({USER: "another:password"})
    reference = scene.add(noisy("refused"), private)
    with pytest.raises(grpc.RpcError) as refused:
        scene.node.pull(reference)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    said = words_of(refused.value)
    assert f"{folder}/config.json: answered 401" in said
    assert "no credentials: answered 401" in said
    assert "word" not in said


def test_credentials_withdrawn_for_good_are_an_error_that_says_so_until_they_are_back(
    scene: Scene, private: FakeRegistry
) -> None:
    case = noisy("withdrawn")
    private.gate = gate = BasicGate({USER: PASSWORD}, status=403)
    reference = scene.lazily(case, private)
    first, second = sorted(case.rows)
    with scene.node.mounted(case.chain_id) as root:
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""
        gate.users.clear()
        mark = len(scene.node.ember.log())
        began_s = time.monotonic()
        assert "Input/output error" in ended_well(reader(root / second, sha256_of(case, second)))
        assert MISS_S - 0.5 < time.monotonic() - began_s < 2.5 * MISS_S
        complaints = scene.complaints(mark)
        assert complaints
        assert all("config.json: answered 403" in each.why for each in complaints)
        assert len(private.seen) < 40, "a lost credential must not become a storm"
        (layer,) = [layer for layer in scene.node.image(reference)["layers"] if layer["trouble"]]
        assert "config.json: answered 403" in layer["trouble"]
        shown = scene.node.ember.command("status")
        assert f"does not come: {layer['trouble']}" in shown
        gate.users[USER] = PASSWORD
        wanted, path = sha256_of(case, second), root / second
        assert scene.node.until(lambda: ended_well(reader(path, wanted)) == "", 20)
        assert not [each for each in scene.node.image(reference)["layers"] if each["trouble"]]


def test_credentials_withdrawn_and_given_back_cost_a_read_time_and_no_error(
    patient: Scene,
) -> None:
    case = noisy("given back")
    with at(patient, FILE) as registry:
        registry.gate = gate = BasicGate({USER: PASSWORD})
        patient.lazily(case, registry)
        gate.users.clear()
        with patient.node.mounted(case.chain_id) as root:
            waiting = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
            assert patient.node.until(lambda: len(registry.seen) >= 2, 10)
            gate.users[USER] = PASSWORD
            assert [ended_well(process, PATIENT_S) for process in waiting] == ["", ""]


def test_a_password_that_is_changed_is_taken_up_in_mid_read(
    scene: Scene, private: FakeRegistry, folder: Path
) -> None:
    case = noisy("rotated")
    private.gate = gate = BasicGate({USER: PASSWORD})
    scene.lazily(case, private)
    gate.users[USER] = "new:one"
    with scene.node.mounted(case.chain_id) as root:
        waiting = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
        assert scene.node.until(lambda: len(private.seen) >= 2, 10)
        write_docker_config(folder, "new:one")
        assert [ended_well(process, MISS_S) for process in waiting] == ["", ""]


def test_a_token_that_ends_under_many_readers_is_renewed_once(
    scene: Scene, private: FakeRegistry
) -> None:
    case = noisy("many readers", 2_000_000)
    gate = TokenGate(private, users={USER: PASSWORD})
    scene.lazily(case, private)
    assert gate.tokens == 1
    ends_after = 10

    def ends(seen: Seen) -> bool:
        if len(private.asked("/blobs/")) == ends_after:
            gate.revoke()
        return False

    private.inject(answer_with(500), ends)
    with scene.node.mounted(case.chain_id) as root:
        readers = [
            reader(root / name, sha256_of(case, name), seed)
            for seed in range(4)
            for name in sorted(case.rows)
        ]
        assert [ended_well(process) for process in readers] == [""] * len(readers)
    assert len(private.asked("/blobs/")) > 3 * ends_after
    assert gate.tokens == 2


def test_a_private_layer_that_is_here_is_for_no_image_whose_repository_does_not_give_it(
    scene: Scene, private: FakeRegistry
) -> None:
    private.gate = BasicGate({USER: PASSWORD})
    blobs, rows = noise_blobs("kept private")
    case = image("kept private", blobs, rows)
    assert scene.node.pull(scene.add(case, private)).lazy_layers == 2
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
    taking = image("taking it", [gzipped(layer(file(b"own", b"own"))), *blobs], rows)
    reference = scene.add(taking)
    theirs = scene.registry.repository(taking.repository).blobs
    for blob in blobs:  # its manifest names them, and that is all
        del theirs[digest(blob.data)]
    private.seen.clear()
    for _ in range(2):
        with pytest.raises(grpc.RpcError):
            scene.node.pull(reference)
        shown = scene.node.image(reference)
        assert not shown["lazy"]
        assert digest(blobs[0].data) in shown["reason"]
    assert private.seen == []
    for blob in blobs:  # who can give them shares them: they are not fetched again
        theirs[digest(blob.data)] = blob.data
    scene.registry.seen.clear()
    scene.node.containerd.collect_garbage()  # of what the failed pulls began to unpack
    assert scene.node.pull(reference).lazy_layers == 3
    with scene.node.mounted(taking.chain_id) as root:
        assert read_all(scene, taking, root) == ["", ""]
    for blob in blobs:
        asked = scene.registry.asked(digest(blob.data))
        assert [seen.headers["range"] for seen in asked] == ["bytes=0-0"]
