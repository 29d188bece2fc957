"""Odd images through the whole daemon and a real containerd: as a first pull, and then lazily.

Each image is pushed byte for byte, pulled through Ember, mounted as a container would have it, and
compared with what is written down for it; then its data is dropped, its index kept, and the same
must be seen again. What must be refused is refused by name, within seconds, and harms nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from bench.bed.process import BedError
from bench.bed.registry import Pusher
from tests.cases.images import Blob, ImageCase, gzipped, image, of_layers, zstandarded
from tests.cases.layers import in_one_layer
from tests.cases.odd import (
    chain_of_layers,
    harmless,
    large,
    odd_images,
    plain_of,
    rows_of,
    zstd_streams,
)
from tests.cases.refused import all_refused
from tests.cases.refused_images import refused_images
from tests.cases.rows import is_file
from tests.cases.stacks import of_several_layers
from tests.cases.tars import file, layer
from tests.node import Node, node
from tests.treecheck import CONTAINERD_DEPARTURES, compare, directory_sizes

pytestmark = [pytest.mark.root, pytest.mark.containerd]

REFUSED_WITHIN_S = 5.0
LAYERS = [of_layers(case, n) for n, case in enumerate((*in_one_layer(), *of_several_layers()))]
REFUSED = [
    *refused_images(),
    *(image(f"tar {bad.name}", [gzipped(bad.plain)], refused=bad.word) for bad in all_refused()),
]
SAMPLE = [harmless(), *large(), *zstd_streams(), chain_of_layers(20)]

CONTAINERD_CANNOT = {
    # 1.6 believes a label that says "not compressed".
    "wrong labels": "invalid tar header",
    "wrong labels in a docker manifest": "invalid tar header",
    # It does not look into the configs.
    "index without platforms": "no match for platform",
}
"""Images that containerd gives up on, with what it says; all of them are well-formed."""


def name_of(case: ImageCase) -> str:
    return case.name


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("cache")) as made:
        harmless().push(made.bed.registry)
        made.pull(harmless().reference)
        yield made


@pytest.fixture(scope="module")
def ours2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("cache"), major=2) as made:
        yield made


def differences(ours: Node, case: ImageCase) -> list[str]:
    return compare(case.rows, ours.shown(case.chain_id), (directory_sizes,))


def check_first_and_lazily(ours: Node, case: ImageCase, pull: Callable[[str], object]) -> None:
    case.push(ours.bed.registry)
    for _ in ("first", "lazily"):
        pull(case.reference)
        seen = ours.image(case.reference)
        assert (seen["lazy"], seen["reason"]) == (True, "")
        assert differences(ours, case) == []
        kept = ours.drop(case.reference).kept
        assert all("has it too" in line for line in kept), kept
        assert kept or not ours.image(case.reference)["here_bytes"]
    assert not ours.blobs() & set(case.stored)


@pytest.mark.parametrize("case", [*odd_images(), *LAYERS], ids=name_of)
def test_what_is_shown_is_what_is_written_down(case: ImageCase, ours: Node) -> None:
    check_first_and_lazily(ours, case, ours.pull)
    assert ours.image(case.reference)["lazy"]


@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_the_same_under_containerd_2_by_its_own_pull(case: ImageCase, ours2: Node) -> None:
    check_first_and_lazily(ours2, case, lambda name: ours2.containerd.pull(name, "ember"))
    assert ours2.image(case.reference)["lazy"]


@pytest.mark.parametrize("case", odd_images(), ids=name_of)
def test_containerds_own_overlayfs_shows_the_same(case: ImageCase, ours: Node) -> None:
    case.push(ours.bed.registry)
    if case.name in CONTAINERD_CANNOT:
        with pytest.raises(BedError, match=CONTAINERD_CANNOT[case.name]):
            ours.containerd.pull(case.reference)
        return
    ours.containerd.pull(case.reference)
    shown = ours.shown(case.chain_id, snapshotter="overlayfs")
    assert compare(case.rows, shown, CONTAINERD_DEPARTURES) == []


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_what_is_wrong_is_refused_by_name_and_harms_nothing(case: ImageCase, ours: Node) -> None:
    case.push(ours.bed.registry)
    for _ in ("first", "again"):
        began_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            ours.pull(case.reference)
            ours.shown(case.chain_id)
        assert case.refused in str(caught.value.details())
        assert time.monotonic() - began_s < REFUSED_WITHIN_S
    assert differences(ours, harmless()) == []


def test_what_ember_alone_refuses_is_unpacked_by_containerd_when_it_is_pulled_again(
    ours: Node,
) -> None:
    plain = layer(file(b"../climbs", b"out"), file(b"stays", b"in"))
    case = image("refused by ember alone", [gzipped(plain)], {"stays": is_file(b"in")})
    case.push(ours.bed.registry)
    ours.pull(case.reference)
    with pytest.raises(grpc.RpcError, match="leaves the layer's root"):
        ours.shown(case.chain_id)
    ours.containerd.remove_image(case.reference)
    pulled = ours.pull(case.reference)
    assert pulled.lazy_layers == 0
    assert "leaves the layer's root" in pulled.reason
    assert ours.image(case.reference)["reason"] == pulled.reason
    shown = ours.shown(case.chain_id)
    assert compare(case.rows, {"stays": shown["stays"]}, CONTAINERD_DEPARTURES) == []


@pytest.mark.parametrize("first", [gzipped, zstandarded], ids=["gzip", "zstd"])
def test_a_blob_that_is_gone_is_replaced_by_another_of_the_same_diff_id(
    first: Callable[[bytes], Blob], ours: Node
) -> None:
    name = f"the first is gone {first.__name__}"
    second = zstandarded if first is gzipped else gzipped
    cases = [
        image(f"{name} {n}", [pack(plain_of(name))], rows_of(name))
        for n, pack in enumerate((first, second))
    ]
    for case in cases:
        case.push(ours.bed.registry)
    ours.pull(cases[0].reference)
    assert differences(ours, cases[0]) == []
    ours.drop(cases[0].reference)
    assert ours.image(cases[0].reference)["here_bytes"] == 0
    ours.pull(cases[1].reference)
    assert ours.image(cases[1].reference)["lazy"]
    assert differences(ours, cases[1]) == []
    ours.ember.remove(cases[1].reference)
    ours.drop(cases[0].reference)
    ours.pull(cases[1].reference)
    Pusher(ours.bed.registry, cases[0].repository).delete_blob(cases[0].stored[0])
    assert ours.image(cases[0].reference)["here_bytes"] == 0
    for case in cases:
        assert differences(ours, case) == []


def test_all_odd_images_are_different_images() -> None:
    names = [case.repository for case in (*odd_images(), *LAYERS, *REFUSED)]
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"odd/[a-z0-9-]+", name) for name in names)
