"""docs/private-registries.md, followed: the files that it shows let Ember in where they say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from snapshotter.config import parse
from snapshotter.content import BlobRef, Extent
from snapshotter.daemon.opening import open_origins
from snapshotter.daemon.undo import Undo
from snapshotter.errors import UnauthorizedError
from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.oci.registry import RegistryClient
from tests.documents import snippet
from tests.fakes.certificates import Authority
from tests.fakes.clients import read
from tests.fakes.gates import BasicGate
from tests.fakes.registry import FakeRegistry
from tests.fakes.skipping_clock import SkippingClock

DATA = bytes(range(200)) * 10
USERS = {"puller": "secret"}


@asynccontextmanager
async def ember_with(text: str, **paths: Path) -> AsyncIterator[RegistryClient]:
    """The client that the daemon has with this configuration, its paths being ``paths``."""
    for name, path in paths.items():
        assert name in text
        text = "\n".join(
            f"{name} = {json.dumps([str(path)] if '[' in line else str(path))}"
            if line.startswith(f"{name} = ")
            else line
            for line in text.splitlines()
        )
    undo = Undo()
    try:
        yield open_origins(parse(text, "x"), PullCredentials(), SkippingClock(), undo)
    finally:
        await undo.run()


@asynccontextmanager
async def guarded() -> AsyncIterator[tuple[FakeRegistry, BlobRef]]:
    """A registry that lets in the user of the document."""
    async with FakeRegistry() as registry:
        registry.gate = BasicGate(USERS)
        digest = registry.add_blob("team/app", DATA)
        yield registry, BlobRef(f"{registry.authority}/team/app", digest, len(DATA))


async def test_without_any_of_it_nobody_is_let_in(tmp_path: Path) -> None:
    nowhere = tmp_path / "absent"
    text = snippet("private-registries", "which takes the place of root's own file")
    async with guarded() as (_, blob), ember_with(text, docker_config=nowhere) as client:
        with pytest.raises(UnauthorizedError):
            await read(client, blob, Extent(0, 10))


async def test_a_login_in_a_docker_file_lets_in(tmp_path: Path) -> None:
    file = tmp_path / "docker.json"
    text = snippet("private-registries", "which takes the place of root's own file")
    async with guarded() as (registry, blob), ember_with(text, docker_config=file) as client:
        login = snippet("private-registries", "A login for the node")
        file.write_text(login.replace("registry.example", registry.authority))
        assert await read(client, blob, Extent(5, 10)) == DATA[5:15]


async def test_a_plugin_of_the_kubelets_lets_in(tmp_path: Path) -> None:
    config, text = tmp_path / "providers.yaml", snippet("private-registries", "a cloud's plugin")
    plugin = tmp_path / "example-login"
    paths = {"credential_provider_config": config, "credential_provider_bin_dir": tmp_path}
    async with guarded() as (registry, blob):
        yaml = snippet("private-registries", "with the kubelet's own file")
        config.write_text(yaml.replace("registry.example", registry.authority))
        answer = {
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "kind": "CredentialProviderResponse",
            "cacheKeyType": "Registry",
            "auth": {registry.authority: {"username": "puller", "password": "secret"}},
        }
        plugin.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(answer)}'\n")
        plugin.chmod(0o755)
        async with ember_with(text, **paths) as client:
            assert await read(client, blob, Extent(5, 10)) == DATA[5:15]


async def test_a_mirror_with_a_ca_of_its_own_is_asked_first(tmp_path: Path) -> None:
    certificates = tmp_path / "ca"
    certificates.mkdir()
    authority = Authority(certificates)
    async with guarded() as (registry, blob), FakeRegistry(authority.server_context()) as mirror:
        mirror.add_blob("team/app", DATA)
        folder = tmp_path / registry.authority
        folder.mkdir()
        (folder / "mirror-ca.pem").write_bytes(authority.path.read_bytes())
        hosts = snippet("private-registries", "A mirror with a CA of its own")
        for theirs, ours in (
            ("https://registry.example", registry.url),
            ("https://mirror.example", f"https://127.0.0.1:{mirror.port}"),
        ):
            assert theirs in hosts
            hosts = hosts.replace(theirs, ours)
        (folder / "hosts.toml").write_text(hosts)
        text = "[registry]\nhosts_dir = 0"
        async with ember_with(text, hosts_dir=tmp_path) as client:
            assert await read(client, blob, Extent(5, 10)) == DATA[5:15]
        assert registry.seen == []
        assert len(mirror.seen) == 1


def test_a_registry_without_tls_is_named_as_the_page_says() -> None:
    text = snippet("private-registries", "A registry without TLS")
    assert parse(text, "x").registry.plain_http == ("registry.lan:5000",)
