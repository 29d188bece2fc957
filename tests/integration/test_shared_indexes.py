"""What one node pushes another one uses: two nodes, one registry without a referrers API."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotter.indexes.keys import write_key_pair
from tests.cases.images import OCI, ImageCase
from tests.fakes.registry import answer_with
from tests.integration.registry_scene import Registries, noisy
from tests.node import Node, node
from tests.real_registries import program, push

pytestmark = [pytest.mark.root, pytest.mark.containerd]

SIZE = 6_000_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """A key, and a directory of trusted ones that holds it."""

    directory: Path
    key: Path
    trusted: Path

    def pushing(self) -> dict[str, object]:
        return {"trusted_keys": str(self.trusted), "push": True, "sign_key": str(self.key)}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    made = Fleet(tmp_path, tmp_path / "key", tmp_path / "trusted")
    made.trusted.mkdir(mode=0o755)
    write_key_pair(made.key)
    (made.trusted / "fleet.pub").write_bytes((tmp_path / "key.pub").read_bytes())
    return made


@pytest.fixture
def first(fleet: Fleet) -> Iterator[Node]:
    with node(fleet.directory, sections={"index": fleet.pushing()}) as made:
        yield made


def origins(on: Node, reference: str) -> set[str]:
    return {layer["index_from"]["origin"] for layer in on.image(reference)["layers"]}


@contextlib.contextmanager
def with_referrers(on: Node) -> Iterator[str]:
    """``host:port`` of a registry with a referrers API on the node's link."""
    words = [*on.bed.link.enter(), str(program())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def push_to(on: Node, authority: str, case: ImageCase) -> str:
    registries = Registries(on.bed.name)
    try:
        return registries.do(asyncio.to_thread(push, authority, case))
    finally:
        registries.stop()


def forgotten(on: Node, reference: str) -> bool:
    """Whether nothing of the image is left on the node."""
    on.remove(reference)
    index = on.ember.root / "index"
    return not any(index.iterdir()) and not on.status()["images"]


def test_what_is_pushed_to_a_registry_with_a_referrers_api_is_found_there(first: Node) -> None:
    case = noisy("built and listed", 1_000_000)
    with with_referrers(first) as authority:
        reference = push_to(first, authority, case)
        assert first.pull(reference).lazy_layers == 2
        shown = first.shown(case.chain_id)
        assert first.until(lambda: "are pushed to" in first.ember.log())
        assert first.until(lambda: forgotten(first, reference))
        assert first.pull(reference).lazy_layers == 2
        assert origins(first, reference) == {"signed"}
        assert first.shown(case.chain_id) == shown


def test_a_registry_that_takes_no_pushes_is_said_once_and_harms_no_pull(first: Node) -> None:
    case = noisy("not to be pushed")
    registries = Registries(first.bed.name)
    with registries.another() as registry:
        for content in case.contents:
            registry.add_blob(case.repository, content)
        registry.add_manifest(case.repository, case.documents[0], f"{OCI}.manifest.v1+json", "1")
        registry.inject(answer_with(403), lambda seen: seen.method in ("POST", "PUT", "PATCH"))
        reference = f"{registry.authority}/{case.repository}:1"
        assert first.pull(reference).lazy_layers == 2
        assert first.shown(case.chain_id)
        assert first.until(lambda: "are not pushed" in first.ember.log())
        assert first.ember.log().count("are not pushed") == 1
        assert origins(first, reference) == {"here"}
    registries.stop()


def test_a_second_node_with_an_empty_cache_has_every_layer_lazy_by_what_the_first_one_built(
    fleet: Fleet, first: Node
) -> None:
    case = noisy("built once", SIZE)
    case.push(first.bed.registry)
    assert first.pull(case.reference).lazy_layers == 2
    shown = first.shown(case.chain_id)
    assert origins(first, case.reference) == {"here"}
    assert first.until(lambda: "are pushed to" in first.ember.log())
    first.ember.kill()
    first.start_again()  # and once it is enough
    with node(fleet.directory, sections={"index": {"trusted_keys": str(fleet.trusted)}}) as second:
        before = second.bed.registry.sent_bytes()
        assert second.pull(case.reference).lazy_layers == 2
        assert origins(second, case.reference) == {"signed"}
        assert second.bed.registry.sent_bytes() - before < SIZE / 10
        assert second.shown(case.chain_id) == shown
    assert "are pushed to" in first.ember.log()
    assert first.ember.log().count("the indexes of") == 1
