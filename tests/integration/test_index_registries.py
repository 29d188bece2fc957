"""Index artifacts in registries that others wrote: one with referrers, one with the tag only."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.indexes.artifact import ARTIFACT_TYPE
from snapshotter.indexes.keys import write_key_pair
from tests.cases.images import digest, gzipped, image, zstandarded
from tests.cases.tars import file, layer
from tests.real_registries import ask, docker_registry, push, referrers_registry

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
DATA = b"".join(random.Random(n).randbytes(90) + bytes(100) for n in range(8000))
LAYERS = [gzipped(layer(file(b"base", DATA))), zstandarded(layer(file(b"own", DATA[:90_000])))]
CASE = image("really indexed", LAYERS)
REGISTRIES = {"tag": docker_registry, "api": referrers_registry}


class Bench:
    """A registry with an image, and a user who builds."""

    def __init__(self, authority: str, directory: Path) -> None:
        self.authority = authority
        self.directory = directory
        self.reference = push(authority, CASE)

    @property
    def base(self) -> str:
        return f"http://{self.authority}/v2/{CASE.repository}"

    def begin(self, *words: str, cache: str = "cache") -> subprocess.Popen[str]:
        own = {"HOME": str(self.directory), "XDG_CACHE_HOME": str(self.directory / cache)}
        return subprocess.Popen(
            [sys.executable, "-B", "-m", "snapshotter.cli.main", "index", *words, "--json"],
            env={**os.environ, **own, "PYTHONPATH": str(ROOT), "EMBER_CONFIG": self._config()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _config(self) -> str:
        path = self.directory / "config.toml"
        path.write_text("")
        return str(path)

    def told(self, *words: str, cache: str = "cache") -> Any:
        return ended(self.begin(*words, cache=cache))

    def key(self, name: str) -> str:
        path = self.directory / name
        write_key_pair(path)
        return str(path)

    def listed(self) -> list[dict[str, Any]]:
        """What anybody sees of the image's referrers: by the API, else under the tag."""
        named = digest(CASE.documents[-1])
        said = ask("GET", f"{self.base}/referrers/{named}")
        if said.status == 404:
            said = ask("GET", f"{self.base}/manifests/{named.replace(':', '-')}")
        assert said.status == 200
        entries: list[dict[str, Any]] = json.loads(said.body)["manifests"]
        return entries


def ended(process: subprocess.Popen[str]) -> Any:
    """The JSON of a command that must succeed."""
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.fixture(params=REGISTRIES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with REGISTRIES[request.param](tmp_path) as authority:
        yield Bench(authority, tmp_path)


def test_an_artifact_is_pushed_listed_and_verified(bench: Bench) -> None:
    key = bench.key("key")
    (row,) = bench.told("build", bench.reference, "--sign", key)["images"]
    (entry,) = bench.listed()
    assert entry["digest"] == row["artifact"]
    # go-containerregistry tells the config's type instead of the artifact's.
    assert entry["artifactType"] in (ARTIFACT_TYPE, "application/vnd.oci.empty.v1+json")
    said = ask("GET", f"{bench.base}/manifests/{row['artifact']}")
    assert json.loads(said.body)["subject"]["digest"] == digest(CASE.documents[-1])
    assert bench.told("verify", bench.reference, "--key", f"{key}.pub", "--deep")["ok"]


def test_two_builders_at_once_are_both_listed_and_index_each_layer_once(bench: Bench) -> None:
    keys = [bench.key("one"), bench.key("two")]
    processes = [bench.begin("build", bench.reference, "--sign", key) for key in keys]
    rows = [ended(process)["images"][0] for process in processes]
    listed = {entry["digest"] for entry in bench.listed()}
    assert listed == {row["artifact"] for row in rows}
    assert len(listed) == len(keys)
    trusting = [word for key in keys for word in ("--key", f"{key}.pub")]
    verified = bench.told("verify", bench.reference, *trusting)
    assert len({one["trusted_key"] for one in verified["artifacts"]}) == len(keys)
    ways = [one["how"] for row in rows for one in row["layers"]]
    assert sorted(ways) == ["built"] * len(LAYERS) + ["cached"] * len(LAYERS)


def test_the_same_build_twice_at_once_is_one_artifact(bench: Bench) -> None:
    key = bench.key("key")
    begun = [
        bench.begin("build", bench.reference, "--sign", key, cache=name) for name in ("a", "b")
    ]
    rows = [ended(process)["images"][0] for process in begun]
    assert len({row["artifact"] for row in rows}) == 1
    assert [entry["digest"] for entry in bench.listed()] == [rows[0]["artifact"]]
