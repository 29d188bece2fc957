"""Nothing secret is said or written by the daemon, whatever goes wrong, at debug level too.

Secrets here are passwords, tokens, what a mirror is sent by hosts.toml, and the query of a signed
link. Registry, token service, storage and mirror answer badly in turn, and the worst of them repeat
in their answers what they were sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.bed.process import BedError
from tests.cases.images import ImageCase
from tests.fakes.gates import Storage, TokenGate, basic
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import Change, FakeRegistry, cut, header, is_blob
from tests.integration.registry_scene import Scene, noisy, scene_in
from tests.integration.test_registry_credentials import (
    FILE,
    PASSWORD,
    USER,
    write_docker_config,
    write_sources,
)
from tests.node import words_of
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

SIGNATURE = "5191a7u4e"
SIGNED = f"&X-Amz-Credential=k3y1d&X-Amz-Signature={SIGNATURE}&se=c4ret%20word"
MIRROR_KEY = "m1rr0r-k3y"
PROXY_PASSWORD = "pr0xy-w0rd"
PROXIED = "10.98.0.1:5098"
"""A registry that is reached through a proxy that is not there."""
SECRETS = [
    PASSWORD,
    basic(USER, PASSWORD).removeprefix("Basic "),
    "token-",
    SIGNATURE,
    "k3y1d",
    "c4ret",
    MIRROR_KEY,
    PROXY_PASSWORD,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def scene(folder: Path) -> Iterator[Scene]:
    def more(folder: Path) -> str:
        plain = f'plain_http = ["{PROXIED}"]\nhosts_dir = "{folder}/certs.d"\n'
        return write_sources(folder) + plain

    environment = {"HTTP_PROXY": f"http://me:{PROXY_PASSWORD}@127.0.0.1:9"}
    with scene_in(folder, more, level="debug", environment=environment) as made:
        yield made


@pytest.fixture
def registry(scene: Scene, folder: Path) -> Iterator[FakeRegistry]:
    write_docker_config(folder)
    address, _, port = FILE.partition(":")
    with scene.registries.another(address, int(port)) as made:
        yield made


def echo(status: int, *headers: tuple[str, str]) -> Change:
    """An error that repeats all that it was sent."""

    def change(seen: Seen, answer: Answer) -> Answer:
        given = seen.headers.get("authorization", "nothing")
        words = f"{seen.target} with {given} {seen.headers.get('x-key', '')} is not liked"
        body = json.dumps({"errors": [{"code": "DENIED", "message": words}]}).encode()
        return Answer(status, [("Content-Type", "application/json"), *headers], body)

    return change


def echoed_header(name: str) -> Change:
    """A header that repeats the link."""
    return lambda seen, answer: header(name, seen.target)(seen, answer) or answer


def said(scene: Scene) -> str:
    """All that is told of images, and the log from the start of the test."""
    return f"{json.dumps(scene.node.status(), indent=1)}\n{log(scene)}"


def log(scene: Scene) -> str:
    return scene.log_since(_mark[0])


_mark = [0]


@pytest.fixture(autouse=True)
def from_here(scene: Scene) -> None:
    _mark[0] = len(scene.node.ember.log())


def leaks(text: str) -> list[str]:
    """The lines that hold a secret."""
    return [line for line in text.splitlines() if any(secret in line for secret in SECRETS)]


def written(scene: Scene) -> list[Path]:
    """The files of the daemon that hold a secret."""
    found = []
    own = [path for path in scene.node.ember.root.rglob("*") if "views" not in path.parts]
    for path in [*own, *scene.node.ember.state.iterdir()]:
        if path.is_file():
            data = path.read_bytes()
            if any(secret.encode() in data for secret in SECRETS):
                found.append(path)
    return found


BY_STORAGE: dict[str, Change] = {
    "refuses": echo(403),
    "fails": echo(500),
    "is busy": echo(429, ("Retry-After", "0")),
    "has it not": echo(404),
    "ends": cut(-1),
    "ends in mid-body": cut(10),
    "is silent": cut(-1, "hang"),
    "lies about the range": echoed_header("Content-Range"),
    "packs it": echoed_header("Content-Encoding"),
}
BY_REGISTRY: dict[str, Change] = {
    "refuses": echo(401),
    "forbids": echo(403),
    "fails": echo(500),
    "is busy": echo(503, ("Retry-After", "0")),
    "redirects nowhere": lambda seen, answer: Answer(
        307, [("Location", f"http://u:{SIGNATURE}@[::1/?X-Amz-Signature={SIGNATURE}")]
    ),
    "redirects to a port that is shut": lambda seen, answer: Answer(
        307, [("Location", f"http://127.0.0.1:9/x?X-Amz-Signature={SIGNATURE}")]
    ),
    "redirects for ever": lambda seen, answer: Answer(
        307, [("Location", f"{seen.path}?X-Amz-Signature={SIGNATURE}")]
    ),
}


def read_one(scene: Scene, case: ImageCase) -> str:
    """What a reader says of a file of ``case``."""
    name = max(case.rows)
    with scene.node.mounted(case.chain_id) as root:
        return ended_well(reader(root / name, sha256_of(case, name)), 20)


@pytest.mark.parametrize("fault", BY_STORAGE)
def test_a_storage_behind_a_redirect_that_fails_gives_no_signature_away(
    scene: Scene, registry: FakeRegistry, fault: str
) -> None:
    case = noisy("storage " + fault)
    TokenGate(registry, users={USER: PASSWORD})
    with scene.registries.another("127.0.0.9") as server:
        scene.add(case, server)
        Storage(server, extra=SIGNED).serve_for(registry)
        scene.lazily(case, registry)
        server.seen.clear()
        server.inject(BY_STORAGE[fault], is_blob, times=1)
        assert read_one(scene, case) == ""
        assert len(server.seen) >= 2
        assert not [seen for seen in server.seen if "authorization" in seen.headers]
    assert leaks(said(scene)) == []


@pytest.mark.parametrize("fault", BY_REGISTRY)
def test_a_registry_that_fails_gives_no_token_and_no_link_away(
    scene: Scene, registry: FakeRegistry, fault: str
) -> None:
    case = noisy("registry " + fault)
    TokenGate(registry, users={USER: PASSWORD})
    scene.lazily(case, registry)
    registry.inject(BY_REGISTRY[fault], is_blob, times=1)
    assert read_one(scene, case) == ""
    assert len(registry.seen) >= 2
    assert leaks(said(scene)) == []


def test_a_read_that_fails_in_the_end_gives_nothing_away(
    scene: Scene, registry: FakeRegistry
) -> None:
    case = noisy("lasting", 50_000)
    gate = TokenGate(registry, users={USER: PASSWORD})
    reference = scene.lazily(case, registry)
    gate.revoke()
    registry.inject(echo(401), lambda seen: is_blob(seen) or seen.path == "/token")
    mark = len(scene.node.ember.log())
    assert "Input/output error" in read_one(scene, case)
    assert "is not liked" in scene.complaints(mark)[0].why
    ember = scene.node.ember
    shown = [ember.command("status", *words) for words in ([], ["--json"], [reference])]
    assert all("is not liked" in text for text in shown)
    assert leaks("\n".join([*shown, ember.command("images"), said(scene)])) == []


@pytest.mark.parametrize("status", [401, 500])
def test_a_pull_that_fails_gives_nothing_away(
    scene: Scene, registry: FakeRegistry, status: int
) -> None:
    gate = TokenGate(registry, users={USER: PASSWORD})
    reference = scene.add(noisy(f"pull {status}", 5000), registry)
    registry.inject(echo(status), lambda seen: bool(gate.tokens))
    with pytest.raises(grpc.RpcError) as refused:
        scene.node.pull(reference)
    with pytest.raises(BedError) as failed:
        scene.node.ember.pull(reference)
    assert "is not liked" in str(failed.value)
    assert leaks(f"{refused.value}\n{failed.value}\n{log(scene)}") == []


def test_a_token_service_with_a_secret_in_its_place_is_refused_without_it(
    scene: Scene, registry: FakeRegistry
) -> None:
    TokenGate(registry, realm=f"http://me:{SIGNATURE}@127.0.0.2/token?key={SIGNATURE}")
    with pytest.raises(grpc.RpcError) as refused:
        scene.node.pull(scene.add(noisy("realm", 5000), registry))
    assert "token service" in words_of(refused.value)
    assert leaks(f"{refused.value}\n{log(scene)}") == []


def test_what_a_mirror_is_sent_by_hosts_toml_is_not_said(scene: Scene, folder: Path) -> None:
    case = noisy("mirror", 50_000)
    with (
        scene.registries.another("127.0.0.8") as mirror,
        scene.registries.another("127.0.0.7") as registry,
    ):
        place = folder / "certs.d" / registry.authority
        place.mkdir(parents=True)
        (place / "hosts.toml").write_text(
            f'[host."{mirror.url}"]\n[host."{mirror.url}".header]\nx-key = "{MIRROR_KEY}"\n'
        )
        mirror.inject(echo(403))
        scene.lazily(case, registry)
        registry.inject(echo(500), is_blob, times=2)
        assert read_one(scene, case) == ""
        assert any(seen.headers.get("x-key") == MIRROR_KEY for seen in mirror.seen)
    assert leaks(said(scene)) == []


def test_a_proxy_s_password_is_not_said(scene: Scene) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        scene.node.pull(f"{PROXIED}/team/app:1")
    assert "127.0.0.1:9" in words_of(refused.value), "it names the proxy that does not answer"
    assert leaks(f"{refused.value}\n{log(scene)}") == []


def test_no_file_of_the_daemon_holds_a_secret(scene: Scene, registry: FakeRegistry) -> None:
    TokenGate(registry, users={USER: PASSWORD})
    scene.lazily(noisy("files", 5000), registry)
    assert written(scene) == []
