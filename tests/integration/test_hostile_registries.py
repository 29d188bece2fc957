"""The whole daemon against registries with bad manners: pulls and reads end right, in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.hostile import Manner, manners, sends_other_bytes
from tests.integration.registry_scene import Scene, of_many_files, read_all, scene_in

pytestmark = [pytest.mark.root, pytest.mark.containerd]

MANNERS: dict[str, Manner] = {
    **manners(nth=6),
    "sends other bytes of the right length": sends_other_bytes(6),
}
MISS_S = 20.0
MOST_REQUESTS = 60
"""Without a fault it takes a dozen or two."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("hostile"), miss_s=MISS_S) as made:
        yield made


@pytest.fixture(autouse=True)
def well_again(scene: Scene) -> Iterator[None]:
    yield
    scene.registry.heal()
    scene.registry.gate = None


@pytest.mark.parametrize("manner", MANNERS)
def test_reads_end_right_in_time_and_for_a_bounded_number_of_requests(
    scene: Scene, manner: str
) -> None:
    case = of_many_files("reads where it " + manner)
    scene.lazily(case)
    MANNERS[manner](scene.registry)
    with scene.node.mounted(case.chain_id) as root:
        said = read_all(scene, case, root, MISS_S)
    assert said == [""] * len(said)
    assert len(scene.registry.asked("/blobs/")) <= MOST_REQUESTS


@pytest.mark.parametrize("manner", MANNERS)
def test_a_first_pull_ends_right(scene: Scene, manner: str) -> None:
    case = of_many_files("pulls where it " + manner)
    reference = scene.add(case)
    scene.registry.seen.clear()
    MANNERS[manner](scene.registry)
    pulled = scene.node.pull(reference)
    assert pulled.lazy_layers == 2, pulled.reason
    with scene.node.mounted(case.chain_id) as root:
        said = read_all(scene, case, root, MISS_S)
    assert said == [""] * len(said)
    assert len(scene.registry.asked("/blobs/")) <= MOST_REQUESTS
