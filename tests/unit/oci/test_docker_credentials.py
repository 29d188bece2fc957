"""Credentials from Docker's files and helpers, as they are and as they go wrong."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from snapshotter.errors import (
    UnavailableError,
)
from snapshotter.oci.credentials import (
    Credential,
    Search,
    Wanted,
)
from snapshotter.oci.dockerconfig import DockerConfigSource
from snapshotter.oci.programs import ProgramRunner
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.oci.credential_parts import APP, HUB, names, script


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
