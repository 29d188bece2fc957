"""How an image without an index comes: unpacked by containerd and indexed when idle, or streamed.

What goes over the link is counted: an index that is made afterwards costs no byte of it, and the
pull after that is lazy. Every image that is not lazy says why.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.bed.link import Shape
from tests.cases.images import ImageCase, as_it_is, gzipped, image, zstandarded
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.node import Node, node
from tests.treecheck import CONTAINERD_DEPARTURES, Rows, compare

pytestmark = [pytest.mark.root, pytest.mark.containerd]

DOCUMENT_BYTES = 50_000


def noise(name: str, *sizes: int) -> ImageCase:
    """A layer of noise for each of ``sizes``, in every packing in turn."""
    packs = (gzipped, zstandarded, as_it_is)
    blobs, rows = [], Rows()
    for n, size in enumerate(sizes):
        data = random.Random(f"{name}{n}").randbytes(size)
        blobs.append(packs[n % 3](layer(file(b"f%d" % n, data))))
        rows[f"f{n}"] = is_file(data)
    return image(name, blobs, rows)


def differences(ours: Node, case: ImageCase) -> list[str]:
    return compare(case.rows, ours.shown(case.chain_id), CONTAINERD_DEPARTURES)


def is_indexed(ours: Node, case: ImageCase) -> bool:
    layers = ours.image(case.reference)["layers"]
    return {each["state"] for each in layers} == {"indexed"}


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("cache"), first_pull="overlay") as made:
        yield made


def check_indexed_when_idle(ours: Node, case: ImageCase) -> None:
    """The image was just unpacked by containerd: its index costs nothing, and the rest is lazy."""
    registry, stored = ours.bed.registry, set(case.stored)
    assert not ours.image(case.reference)["lazy"]
    assert differences(ours, case) == []
    assert stored <= ours.blobs()
    sent_bytes = registry.sent_bytes()
    assert ours.until(lambda: is_indexed(ours, case))
    assert registry.sent_bytes() - sent_bytes == 0
    ours.containerd.remove_image(case.reference)
    assert ours.until(lambda: not stored & ours.blobs())
    sent_bytes = registry.sent_bytes()
    pulled = ours.pull(case.reference)
    assert (pulled.lazy_layers, pulled.reason) == (pulled.layers, "")
    with ours.mounted(case.chain_id) as root:
        assert len(list(root.iterdir())) == len(case.rows)
        assert registry.sent_bytes() - sent_bytes < DOCUMENT_BYTES
    assert differences(ours, case) == []
    assert not stored & ours.blobs()
    assert ours.image(case.reference)["lazy"]


def test_an_unpacked_image_is_indexed_when_idle_and_lazy_from_then_on(overlay: Node) -> None:
    case = noise("unpacked first", 300_000, 2_000_000, 400_000)
    case.push(overlay.bed.registry)
    pulled = overlay.pull(case.reference)
    assert pulled.lazy_layers == 0
    assert 'first_pull.mode = "overlay"' in pulled.reason
    assert overlay.image(case.reference)["reason"] == pulled.reason
    check_indexed_when_idle(overlay, case)


def test_a_removal_keeps_what_was_indexed_for_the_next_pull_and_the_next_one_takes_it(
    overlay: Node,
) -> None:
    case = noise("comes again", 300_000, 200_000)
    case.push(overlay.bed.registry)
    overlay.pull(case.reference)
    assert overlay.until(lambda: is_indexed(overlay, case))
    assert "lazy when it is removed and" in overlay.image(case.reference)["reason"]
    assert overlay.image(case.reference)["namespaces"] == [overlay.namespace]
    (kept,) = overlay.drop(case.reference).kept
    assert "bytes are containerd's" in kept
    reply = overlay.remove(case.reference)
    assert any(case.reference in line for line in reply.removed)
    assert "next pull can be lazy" in reply.kept[-1]
    assert overlay.image(case.reference)["namespaces"] == []
    pulled = overlay.pull(case.reference)
    assert (pulled.lazy_layers, pulled.reason) == (pulled.layers, "")
    assert differences(overlay, case) == []
    assert overlay.image(case.reference)["layers"][0]["tiers"]["registry"] > 0
    assert overlay.until(lambda: not overlay.remove(case.reference).kept)
    assert all(case.reference not in image["names"] for image in overlay.status()["images"])


def test_a_removal_of_a_removed_image_takes_its_indexes(overlay: Node) -> None:
    case = noise("goes for good", 200_000)
    case.push(overlay.bed.registry)
    overlay.pull(case.reference)
    assert overlay.until(lambda: is_indexed(overlay, case))
    assert overlay.remove(case.reference).kept
    reply = overlay.remove(case.reference)
    assert not reply.kept and any("index of layer" in line for line in reply.removed)
    assert overlay.pull(case.reference).lazy_layers == 0


def test_the_same_with_containerd_2_and_its_own_pull(tmp_path: Path) -> None:
    case = noise("unpacked first by 2.x", 300_000, 200_000)
    with node(tmp_path, major=2, first_pull="overlay") as ours:
        case.push(ours.bed.registry)
        ours.containerd.pull(case.reference, "ember")
        assert 'first_pull.mode = "overlay"' in ours.image(case.reference)["reason"]
        check_indexed_when_idle(ours, case)


def test_the_wish_for_an_index_outlives_the_daemon(overlay: Node) -> None:
    case = noise("unpacked, then killed", 300_000, 200_000)
    case.push(overlay.bed.registry)
    assert overlay.pull(case.reference).lazy_layers == 0
    overlay.ember.kill()
    overlay.start_again()
    sent_bytes = overlay.bed.registry.sent_bytes()
    assert overlay.until(lambda: is_indexed(overlay, case))
    assert overlay.bed.registry.sent_bytes() == sent_bytes


def test_a_layer_that_two_images_share_is_indexed_once_for_both(overlay: Node) -> None:
    below, above = noise("shared", 500_000), noise("shared", 500_000, 600_000)
    for case in (below, replace(above, name="shares")):
        case.push(overlay.bed.registry)
        overlay.pull(case.reference)
        assert not overlay.image(case.reference)["lazy"]
        assert overlay.until(partial(is_indexed, overlay, case))
        assert differences(overlay, case) == []


def test_auto_decides_by_size_over_the_rate_that_was_reached(tmp_path: Path) -> None:
    small, large = noise("a small one", 1_500_000), noise("a large one", 3_000_000)
    larger = noise("a larger one", 3_200_000)
    settings = {"budget": 2.0, "assumed_rate": 1_000_000}
    with node(tmp_path, first_pull="auto", sections={"first_pull": settings}) as ours:
        for case in (small, large, larger):
            case.push(ours.bed.registry)
        pulled = ours.pull(large.reference)
        assert pulled.lazy_layers == 0
        assert "would take 3 s, over first_pull.budget = 2 s" in pulled.reason
        assert differences(ours, large) == []
        assert ours.pull(small.reference).lazy_layers == 1
        assert differences(ours, small) == []
        pulled = ours.pull(larger.reference)  # streaming has turned out to be quicker than assumed
        assert (pulled.lazy_layers, pulled.reason) == (1, "")
        assert differences(ours, larger) == []
        check_indexed_when_idle(ours, large)


@pytest.mark.parametrize("major", [1, 2])
def test_a_pull_that_containerd_began_stays_its_own_while_its_layers_are_indexed(
    tmp_path: Path, major: int
) -> None:
    case = noise(f"long {major}", *[1_200_000] * 5)
    size_bytes = sum(map(len, case.contents))
    settings = {"first_pull": {"budget": 5.0, "assumed_rate": 1_000_000}}
    with node(tmp_path, major=major, first_pull="auto", sections=settings) as ours:
        case.push(ours.bed.registry)
        ours.bed.link.reshape(Shape(8))
        sent_bytes = ours.bed.registry.sent_bytes()
        if major == 1:
            assert ours.pull(case.reference).lazy_layers == 0
        else:
            ours.containerd.pull(case.reference, "ember")
        ours.bed.link.reshape(Shape(0))
        assert "would take 6 s" in ours.image(case.reference)["reason"]
        assert differences(ours, case) == []
        assert ours.bed.registry.sent_bytes() - sent_bytes < 1.05 * size_bytes
        check_indexed_when_idle(ours, case)


def test_without_a_lazy_path_every_image_is_unpacked_and_says_so(tmp_path: Path) -> None:
    case = noise("no path", 200_000, 100_000)
    with node(tmp_path, sections={"lazy": {"mode": "off"}}) as ours:
        case.push(ours.bed.registry)
        pulled = ours.pull(case.reference)
        assert pulled.lazy_layers == 0
        assert "no lazy data path" in pulled.reason
        assert ours.image(case.reference)["reason"] == pulled.reason
        assert "fetched whole" in ours.ember.command("status")
        assert differences(ours, case) == []
