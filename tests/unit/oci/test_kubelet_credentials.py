"""Credentials from the kubelet's plugins: run as the kubelet does, and kept as long as they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snapshotter.errors import (
    ConfigError,
    UnavailableError,
)
from snapshotter.oci.credentials import (
    Wanted,
)
from snapshotter.oci.kubelet import KubeletPluginSource
from snapshotter.oci.programs import ProgramRunner
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.oci.credential_parts import APP, CONFIG, names, script


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
