"""Where credentials come from: pulls, Docker's files and helpers, the kubelet's plugins."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from snapshotter.content import Extent
from snapshotter.errors import (
    ConfigError,
    DeadlineError,
    InvalidArgumentError,
    UnauthorizedError,
    UnavailableError,
)
from snapshotter.oci.credentials import (
    Candidate,
    Credential,
    MemoryCredentials,
    Search,
    Wanted,
    server_matches,
)
from snapshotter.oci.dockerconfig import DockerConfigSource
from snapshotter.oci.kubelet import KubeletPluginSource
from snapshotter.oci.patterns import match_image
from snapshotter.oci.programs import ProgramRunner
from tests.fakes.clients import read, registry_client, registry_with
from tests.fakes.gates import BasicGate
from tests.fakes.skipping_clock import SkippingClock

HUB = Wanted("docker.io", "library/nginx")
APP = Wanted("registry.example:5000", "team/app")


def user(name: str) -> Credential:
    return Credential(name, "word")


def names(found: Sequence[Credential]) -> list[str]:
    return [credential.username for credential in found]


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_a_secret_never_shows() -> None:
    credential = Credential("user", "s3cr3t", "s3cr3t", "s3cr3t")
    shown = f"{credential} {credential!r} {Candidate(credential)!r} {[credential]}"
    assert "s3cr3t" not in shown
    assert "user" not in repr(credential)


async def test_the_credential_of_the_longest_name_comes_first_and_of_the_latest_pull() -> None:
    pulls = MemoryCredentials()
    for image, name in [
        ("registry.example:5000/team", "team"),
        ("registry.example:5000/team/app:v1", "app-1"),
        ("registry.example:5000/team/app:v2", "app-2"),
        ("registry.example:5000/teamster/app", "neighbour"),
        ("other.example/team/app", "other"),
    ]:
        assert pulls.put(image, user(name))
    assert names(await pulls.find(APP, fresh=False)) == ["app-2", "app-1", "team"]
    pulls.put("registry.example:5000/team/app:v1", user("app-1b"))
    assert names(await pulls.find(APP, fresh=False)) == ["app-1b", "app-1", "app-2", "team"]
    assert pulls.forget("registry.example:5000/team/app:v1")
    assert not pulls.forget("registry.example:5000/team/app:v1")
    assert not pulls.forget("NOT A NAME")
    assert names(await pulls.find(APP, fresh=False)) == ["app-2", "team"]


async def test_what_pulls_leave_behind_is_bounded() -> None:
    pulls = MemoryCredentials()
    for number in range(5000):
        pulls.put(f"registry.example/app{number}", user("u"))
    assert len(pulls) == 4096
    assert await pulls.find(Wanted("registry.example", "app0"), fresh=False) == []
    assert names(await pulls.find(Wanted("registry.example", "app4999"), fresh=False)) == ["u"]


async def test_a_credential_for_another_server_is_not_kept() -> None:
    pulls = MemoryCredentials()
    assert not pulls.put("registry.example/app", user("u"), "https://other.example")
    assert not pulls.put("registry.example/app", Credential("only-a-name"))
    assert pulls.put("registry.example/app", user("u"), "https://registry.example/v2/")
    with pytest.raises(InvalidArgumentError):
        pulls.put("NOT A NAME", user("u"))


@pytest.mark.parametrize(
    ("server", "registry", "same"),
    [
        ("https://index.docker.io/v1/", "docker.io", True),
        ("registry-1.docker.io", "docker.io", True),
        ("docker.io", "quay.io", False),
        ("https://registry.example:5000", "registry.example:5000", True),
        ("registry.example", "registry.example:5000", False),
        ("http://REGISTRY.example/v2", "registry.example", True),
    ],
)
def test_a_server_address_means_its_registry(server: str, registry: str, same: bool) -> None:
    assert server_matches(server, registry) is same


@pytest.mark.parametrize(
    ("pattern", "registry", "repository", "matches"),
    [
        ("registry.example:5000", "registry.example:5000", "team/app", True),
        ("registry.example", "registry.example:5000", "team/app", False),
        ("https://registry.example:5000/v2/", "registry.example:5000", "team/app", True),
        ("registry.example:5000/team", "registry.example:5000", "team/app", True),
        ("registry.example:5000/team", "registry.example:5000", "teamster/app", False),
        ("*.dkr.ecr.*.amazonaws.com", "12.dkr.ecr.eu-west-1.amazonaws.com", "a", True),
        ("*.dkr.ecr.*.amazonaws.com", "12.x.dkr.ecr.eu-west-1.amazonaws.com", "a", False),
        ("*.amazonaws.com", "12.dkr.ecr.eu-west-1.amazonaws.com", "a", False),
        ("*.example:5000", "registry.example:5001", "a", False),
        ("gcr.io", "gcr.io", "a", True),
        ("https://index.docker.io/v1/", "docker.io", "library/nginx", True),
        ("docker.io", "docker.io", "library/nginx", True),
        ("*", "localhost", "a", True),
        ("*", "gcr.io", "a", False),
    ],
)
def test_a_pattern_means_what_it_means_to_the_kubelet(
    pattern: str, registry: str, repository: str, matches: bool
) -> None:
    assert (match_image(pattern, registry, repository) is not None) is matches


class Docker:
    """A config.json with helpers that count their runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.folder = folder
        self.clock = SkippingClock()
        environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.source = DockerConfigSource(self.path, ProgramRunner(environment), self.clock)

    def write(self, document: object) -> None:
        self.path.write_text(json.dumps(document))

    def helper(self, name: str, text: str) -> None:
        script(self.folder / f"docker-credential-{name}", f"echo x >> {self.folder}/runs\n{text}")

    @property
    def runs(self) -> int:
        runs = self.folder / "runs"
        return runs.read_text().count("x") if runs.exists() else 0


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path)


async def test_docker_s_auths_are_read_in_all_their_forms(docker: Docker) -> None:
    pair = base64.b64encode(b"user:with:colons").decode()
    docker.write(
        {
            "auths": {
                "https://index.docker.io/v1/": {"auth": pair},
                "registry.example:5000": {"username": "plain", "password": "word"},
                "registry.example:5000/team": {"identitytoken": "refresh"},
                "other.example": {"registrytoken": "bearer"},
                "empty.example": {},
            }
        }
    )
    assert await docker.source.find(HUB, fresh=False) == [Credential("user", "with:colons")]
    refresh, plain = await docker.source.find(APP, fresh=False)
    assert (refresh.identity_token, plain.username) == ("refresh", "plain")
    other = await docker.source.find(Wanted("other.example", "a"), fresh=False)
    assert other == [Credential(registry_token="bearer")]
    assert await docker.source.find(Wanted("empty.example", "a"), fresh=False) == []
    assert await docker.source.find(Wanted("quay.io", "a"), fresh=False) == []


async def test_a_docker_config_that_is_not_there_has_nothing(docker: Docker) -> None:
    assert await docker.source.find(APP, fresh=False) == []


async def test_a_rotated_secret_is_seen_without_a_restart(docker: Docker) -> None:
    for word in ("old", "new"):
        docker.write({"auths": {APP.registry: {"username": "u", "password": word}}})
        assert await docker.source.find(APP, fresh=True) == [Credential("u", word)]
    docker.write({"auths": {APP.registry: {"username": "u", "password": "newest"}}})
    docker.clock.now_s += 3
    assert await docker.source.find(APP, fresh=False) == [Credential("u", "newest")]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"auths": []}',
        '{"auths": {"registry.example:5000": []}}',
        '{"auths": {"registry.example:5000": {"auth": "???"}}}',
        '{"auths": {"registry.example:5000": {"auth": "bm9jb2xvbg=="}}}',
        '{"auths": {"registry.example:5000": {"username": 5}}}',
        '{"credHelpers": {"registry.example:5000": 5}}',
        '{"credHelpers": {"registry.example:5000": "../evil"}}',
        '{"credsStore": 5}',
    ],
)
async def test_a_docker_config_that_is_wrong_is_named(docker: Docker, text: str) -> None:
    docker.path.write_text(text)
    search = Search([docker.source], APP)
    assert await search.find(docker.source, fresh=False) == []
    assert str(docker.path) in search.problems[0]


async def test_a_helper_is_asked_for_its_registry_and_its_answer_kept(docker: Docker) -> None:
    docker.write({"credHelpers": {APP.registry: "fake"}, "auths": {APP.registry: {"auth": "x"}}})
    docker.helper("fake", 'read s; printf \'{"Username":"%s","Secret":"word"}\' "$s"')
    for _ in range(3):
        assert names(await docker.source.find(APP, fresh=False)) == [APP.registry]
    assert docker.runs == 1
    docker.clock.now_s += 6
    await docker.source.find(APP, fresh=True)
    await docker.source.find(APP, fresh=True)
    assert docker.runs == 2


async def test_the_default_store_is_asked_with_docker_s_name_for_the_hub(docker: Docker) -> None:
    docker.write({"credsStore": "fake", "auths": {APP.registry: {}}})
    docker.helper("fake", 'read s; printf \'{"Username":"<token>","Secret":"%s"}\' "$s"')
    hub = await docker.source.find(HUB, fresh=False)
    assert list(hub) == [Credential(identity_token="https://index.docker.io/v1/")]
    assert len(await docker.source.find(APP, fresh=False)) == 1


async def test_a_helper_that_knows_nothing_is_not_a_fault(docker: Docker) -> None:
    docker.write({"credsStore": "fake"})
    docker.helper("fake", "echo credentials not found in native keychain; exit 1")
    for _ in range(5):
        assert not await docker.source.find(APP, fresh=False)
    assert docker.runs == 1


@pytest.mark.parametrize(
    "text",
    ["echo broken >&2; exit 3", "echo nonsense", "echo '{}'", "yes | head -c 2000000", "echo []"],
)
async def test_a_helper_that_fails_is_said_and_not_asked_at_once(docker: Docker, text: str) -> None:
    docker.write({"credsStore": "fake"})
    docker.helper("fake", text)
    for _ in range(5):
        with pytest.raises(UnavailableError, match="docker-credential-fake"):
            await docker.source.find(APP, fresh=False)
    assert docker.runs == 1


async def test_a_helper_that_is_not_installed_is_named(docker: Docker) -> None:
    docker.write({"credsStore": "missing"})
    with pytest.raises(UnavailableError, match="docker-credential-missing"):
        await docker.source.find(APP, fresh=False)


async def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    program = script(tmp_path / "hang", f"sleep 60 & echo $! > {tmp_path}/child; sleep 60")
    with pytest.raises(DeadlineError, match="hang"):
        await ProgramRunner().run([str(program)], b"", timeout_s=0.5)
    child = int((tmp_path / "child").read_text())
    assert has_ended(child)


def has_ended(process_id: int) -> bool:
    """Whether it is gone, or goes within seconds (who adopts it reaps it)."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def test_a_program_need_not_read_what_it_is_given(tmp_path: Path) -> None:
    program = script(tmp_path / "deaf", "echo heard nothing")

    async def run_it() -> set[bytes]:
        runner = ProgramRunner()
        runs = [runner.run([str(program)], b"x" * 100_000, timeout_s=10) for _ in range(12)]
        return {ended.output for ended in await asyncio.gather(*runs)}

    assert uvloop.run(run_it()) == {b"heard nothing\n"}
    assert asyncio.run(run_it()) == {b"heard nothing\n"}


CONFIG = """
apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
  - name: fake
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    matchImages: ["*.example:5000", "registry.example:5000/team"]
    defaultCacheDuration: 10m
    args: [get]
    env: [{name: WHO, value: robot}]
  - name: tokens
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    matchImages: ["*.example:5000"]
    defaultCacheDuration: 0s
    tokenAttributes: {serviceAccountTokenAudience: x}
"""


class Plugins:
    """The configuration above, and a plugin that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)
        self.clock = SkippingClock()
        self.source = KubeletPluginSource(self.config, folder, ProgramRunner(), self.clock)

    def answer(self, scope: str = "Registry", keep: str = "1h", **more: object) -> None:
        document = {
            "kind": "CredentialProviderResponse",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "cacheKeyType": scope,
            "cacheDuration": keep,
            "auth": {
                "*.example:5000": {"username": "wide", "password": "w"},
                "registry.example:5000/team": {"username": "$WHO", "password": "w"},
            },
            **more,
        }
        text = json.dumps(document).replace('"', '\\"')
        self.plugin(f'cat >> {self.folder}/asked; echo "$1" >> {self.folder}/args; echo "{text}"')

    def plugin(self, text: str) -> None:
        script(self.folder / "fake", f"echo x >> {self.folder}/runs\n{text}")

    @property
    def runs(self) -> int:
        return (self.folder / "runs").read_text().count("x")


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    return Plugins(tmp_path)


async def test_a_kubelet_plugin_is_run_as_the_kubelet_does(plugins: Plugins) -> None:
    plugins.answer()
    assert names(await plugins.source.find(APP, fresh=False)) == ["robot", "wide"]
    asked = json.loads((plugins.folder / "asked").read_text())
    assert asked == {
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "kind": "CredentialProviderRequest",
        "image": APP.image,
    }
    assert (plugins.folder / "args").read_text() == "get\n"
    assert await plugins.source.find(Wanted("quay.io", "a"), fresh=False) == []


@pytest.mark.parametrize(("scope", "runs"), [("Image", 3), ("Registry", 2), ("Global", 1)])
async def test_its_answer_is_kept_for_what_it_says(plugins: Plugins, scope: str, runs: int) -> None:
    plugins.answer(scope)
    for registry, name in [("a", "x"), ("a", "y"), ("b", "x")]:
        for _ in range(2):
            wanted = Wanted(f"{registry}.example:5000", name)
            assert names(await plugins.source.find(wanted, fresh=False)) == ["wide"]
    assert plugins.runs == runs


async def test_its_answer_is_kept_as_long_as_it_says_and_renewed_when_refused(
    plugins: Plugins,
) -> None:
    plugins.answer(keep="1h")
    await plugins.source.find(APP, fresh=False)
    plugins.clock.now_s += 3000
    await plugins.source.find(APP, fresh=False)
    assert plugins.runs == 1
    await plugins.source.find(APP, fresh=True)
    await plugins.source.find(APP, fresh=True)
    assert plugins.runs == 2
    plugins.clock.now_s += 3601
    await plugins.source.find(APP, fresh=False)
    assert plugins.runs == 3


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        "echo no json",
        "echo []",
        "echo '{}'",
        'echo \'{"apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"All"}\'',
        'echo \'{"apiVersion":"credentialprovider.kubelet.k8s.io/v9","cacheKeyType":"Image"}\'',
    ],
)
async def test_a_plugin_that_fails_is_said_and_not_run_at_once(plugins: Plugins, text: str) -> None:
    plugins.plugin(text)
    for _ in range(5):
        with pytest.raises(UnavailableError, match="provider fake"):
            await plugins.source.find(APP, fresh=False)
    assert plugins.runs == 1


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "kind: Pod",
        "[]",
        "kind: CredentialProviderConfig\nproviders: {}",
        "kind: CredentialProviderConfig\nproviders: [fake]",
        "kind: CredentialProviderConfig\nproviders: [{name: ../evil}]",
        "kind: CredentialProviderConfig\nproviders: [{name: fake, apiVersion: v0}]",
        CONFIG.replace("10m", "often"),
        CONFIG.replace("[get]", "get"),
        CONFIG.replace("name: WHO", "n: WHO"),
    ],
)
async def test_a_plugin_configuration_that_is_wrong_is_named(plugins: Plugins, text: str) -> None:
    plugins.config.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        await plugins.source.find(APP, fresh=False)


async def test_sources_are_asked_in_order_and_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    async with registry_with(b"0123456789") as (registry, blob):
        registry.gate = BasicGate({"plugin": "word"})
        broken, written = tmp_path / "broken.json", tmp_path / "written.json"
        broken.write_text("{")
        written.write_text(
            json.dumps({"auths": {registry.authority: {"username": "u", "password": "wrong"}}})
        )
        config = tmp_path / "kubelet.yaml"
        config.write_text(CONFIG.replace('"*.example:5000", ', f'"{registry.authority}", '))
        answer = {
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "cacheKeyType": "Global",
            "auth": {registry.authority: {"username": "plugin", "password": "word"}},
        }
        script(tmp_path / "fake", f"echo '{json.dumps(answer)}'")
        pulls = MemoryCredentials()
        pulls.put(blob.repository, Credential("u", "also-wrong"))
        async with registry_client(
            pulls=pulls, docker_configs=(broken, written), kubelet=(config, tmp_path)
        ) as client:
            assert await read(client, blob, Extent(2, 3)) == b"234"
            script(tmp_path / "fake", "exit 1")
            registry.gate = BasicGate({})
            with pytest.raises(UnauthorizedError, match=r"pulls.*written.json.*broken.json"):
                await read(client, blob, Extent(2, 3))


async def test_a_rotated_helper_secret_is_fetched_when_the_old_one_is_refused(
    tmp_path: Path,
) -> None:
    async with registry_with(b"0123456789") as (registry, blob):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"credHelpers": {registry.authority: "fake"}}))
        helper = tmp_path / "docker-credential-fake"
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        clock = SkippingClock()
        async with registry_client(
            docker_configs=(config,), environment=environment, clock=clock
        ) as client:
            for word in ("first", "second"):
                script(helper, f'echo \'{{"Username":"u","Secret":"{word}"}}\'')
                registry.gate = BasicGate({"u": word}, status=403)
                clock.now_s += 10
                assert await read(client, blob, Extent(2, 3)) == b"234"
