"""`ember warm` on a whole node: what it brings is right, enough, and kept for a later pull."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cases.images import ImageCase
from tests.fakes.http_server import Seen
from tests.fakes.registry import answer_with, is_range
from tests.integration.registry_scene import Scene, noisy, read_all, scene_in

pytestmark = [pytest.mark.root, pytest.mark.containerd]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("warm")) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(scene: Scene) -> Iterator[None]:
    yield
    scene.registry.heal()
    scene.registry.seen.clear()


def is_layer(case: ImageCase) -> Callable[[Seen], bool]:
    """Whether a request is for a layer of the image."""
    return lambda seen: any(digest in seen.path for digest in case.stored)


def sizes(case: ImageCase) -> int:
    """Stored bytes of the layers."""
    return sum(len(data) for data in case.contents[:2])


def test_what_was_warmed_without_an_index_is_pulled_and_read_without_a_byte_of_its_layers(
    scene: Scene,
) -> None:
    case = noisy("warmed first")
    reference = scene.add(case)
    last = scene.node.warm(reference)
    assert [layer.state for layer in last.layers] == ["here", "here"]
    assert sum(layer.fetched_bytes for layer in last.layers) == sizes(case)
    assert scene.node.image(reference)["namespaces"] == []
    scene.registry.seen.clear()
    scene.registry.inject(answer_with(503), is_layer(case))
    assert scene.node.pull(reference).lazy_layers == 2
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
    assert not [seen for seen in scene.registry.seen if is_layer(case)(seen)]


def test_what_was_warmed_with_an_index_comes_in_ranges_and_again_not_at_all(scene: Scene) -> None:
    case = noisy("warmed again", 10_000_000)
    reference = scene.lazily(case)
    last = scene.node.warm(reference)
    assert sum(layer.fetched_bytes for layer in last.layers) < 1.01 * sizes(case)
    assert [seen for seen in scene.registry.seen if is_range(seen)]
    again = scene.node.warm(reference)
    assert sum(layer.fetched_bytes for layer in again.layers) == 0
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
