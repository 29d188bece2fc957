"""Where credentials come from: pulls, Docker's files and helpers, the kubelet's plugins."""

from __future__ import annotations

import asyncio
import json
import os
import select
from pathlib import Path

import pytest
import uvloop

from snapshotter.content import Extent
from snapshotter.errors import (
    DeadlineError,
    InvalidArgumentError,
    UnauthorizedError,
)
from snapshotter.oci.credentials import (
    Candidate,
    Credential,
    MemoryCredentials,
    Wanted,
    server_matches,
)
from snapshotter.oci.patterns import match_image
from snapshotter.oci.programs import ProgramRunner
from snapshotter.oci.tokens import basic_value
from tests.fakes.clients import read, registry_client, registry_with
from tests.fakes.gates import BasicGate
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.oci.credential_parts import APP, CONFIG, names, script, user


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
        ("https://[bad", "registry.example", False),
        ("a]b", "registry.example", False),
        ("http://ex\u2100mple/", "registry.example", False),
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


def test_a_user_that_no_header_can_carry_is_refused_by_the_registry_and_not_by_a_fault() -> None:
    assert basic_value(Credential("\ud800", "p")) == "Basic Pzpw"
