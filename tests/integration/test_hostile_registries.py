"""The whole daemon against registries with bad manners: pulls and reads end right, in time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.cases.images import ImageCase, as_it_is, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.fakes.hostile import Manner, manners, sends_other_bytes
from tests.integration.registry_scene import Scene, read_all, scene_in

pytestmark = [pytest.mark.root, pytest.mark.containerd]

FILE_BYTES = 100_000
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


def of_many_files(name: str) -> ImageCase:
    """A gzip and a plain layer of some files each, between which nothing is shared."""
    files = {f"{name}-{n}": random.Random(f"{name}{n}").randbytes(FILE_BYTES) for n in range(16)}
    names = sorted(files)
    parts = [b"".join(file(key.encode(), files[key]) for key in names[at::2]) for at in range(2)]
    blobs = [gzipped(layer(parts[0])), as_it_is(layer(parts[1]))]
    return image(name, blobs, {key: is_file(data) for key, data in files.items()})


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
