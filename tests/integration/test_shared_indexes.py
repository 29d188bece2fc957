"""What one node pushes another one uses: two nodes, one registry without a referrers API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotter.indexes.keys import write_key_pair
from tests.cases.images import ImageCase
from tests.integration.registry_scene import noisy
from tests.node import Node, node

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


def origins(on: Node, case: ImageCase) -> set[str]:
    return {layer["index_from"]["origin"] for layer in on.image(case.reference)["layers"]}


def test_a_second_node_with_an_empty_cache_has_every_layer_lazy_by_what_the_first_one_built(
    fleet: Fleet, first: Node
) -> None:
    case = noisy("built once", SIZE)
    case.push(first.bed.registry)
    assert first.pull(case.reference).lazy_layers == 2
    shown = first.shown(case.chain_id)
    assert origins(first, case) == {"here"}
    assert first.until(lambda: "are pushed to" in first.ember.log())
    first.ember.kill()
    first.start_again()  # and once it is enough
    with node(fleet.directory, sections={"index": {"trusted_keys": str(fleet.trusted)}}) as second:
        before = second.bed.registry.sent_bytes()
        assert second.pull(case.reference).lazy_layers == 2
        assert origins(second, case) == {"signed"}
        assert second.bed.registry.sent_bytes() - before < SIZE / 10
        assert second.shown(case.chain_id) == shown
    assert "are pushed to" in first.ember.log()
    assert first.ember.log().count("the indexes of") == 1
