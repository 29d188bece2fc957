"""The ways that the demo compares, with a tiny image: each fetches what its name promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import Bed
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.bed.tiny import tiny_image
from bench.progress import Progress
from bench.trial import Starter, measure

pytestmark = [pytest.mark.root, pytest.mark.containerd]
# The program's layer has more noise than program: most of the image is never touched.
NOISE_BYTES = 6_000_000


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return tiny_image(tmp_path_factory.mktemp("image"), bytes_each=NOISE_BYTES, layers=3)


@pytest.fixture(params=[1, 2])
def starter(tmp_path: Path, image: Image, request: pytest.FixtureRequest) -> Iterator[Starter]:
    major: int = request.param
    with Bed(Shape(200), cache=tmp_path) as bed:
        image.push(bed.registry)
        ember = bed.ember(major)
        containerd = bed.containerd(major, ember_socket=ember.socket, ember_root=ember.root)
        ember.start()
        yield Starter(bed, containerd, ember, image)


def test_each_way_fetches_what_its_name_promises(starter: Starter, image: Image) -> None:
    overlayfs, first, cold, local = measure(starter, 2, Progress())
    assert all(trial.fetched_bytes > image.size for trial in overlayfs.trials)
    assert all(image.size < trial.fetched_bytes < image.size + 100_000 for trial in first.trials), (
        "a first pull fetches each byte once, in each round"
    )
    assert all(0 < trial.fetched_bytes < image.size / 2 for trial in cold.trials)
    assert all(trial.fetched_bytes == 0 for trial in local.trials)


def test_an_image_that_another_snapshotter_has_keeps_the_layers_of_both(
    starter: Starter, image: Image
) -> None:
    """The config is in the content store already; its references must still be added to."""
    containerd, ember = starter.containerd, starter.ember
    assert ember is not None
    containerd.pull(image.reference)
    ember.pull(image.reference)
    containerd.collect_garbage()
    for snapshotter in ("ember", "overlayfs"):
        started = containerd.start_container(image.reference, snapshotter=snapshotter)
        assert started.output == "ready\n"
