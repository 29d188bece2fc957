"""What waits must hold up nobody else: a first pull behind a registry that hangs, a collection.

containerd holds its locks across Prepare, View and Remove: a call that hung there would stop every
container's start on the node. Only Mounts may wait long, and it ends as soon as it can't succeed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest

from bench.bed.link import Shape
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2
from tests.cases.images import ImageCase, digest
from tests.containers import left_behind
from tests.node import Node, node
from tests.readers import ended_well, noisy, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

PREPARE_S = 10.0
"""What containerd, its locks held, may have to wait for one Prepare, whatever the network does."""
PROMPT_S = 3.0
CRI = "containerd.io/snapshot/cri."


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("cache"), shape=Shape(60)) as made:
        yield made


def lowest_layer(case: ImageCase, parent: str = "") -> snapshots_pb2.PrepareSnapshotRequest:
    """What containerd's unpacker asks for the lowest layer of an image."""
    layers = [layer["digest"] for layer in json.loads(case.documents[-1])["layers"]]
    chain_id = json.loads(case.contents[-1])["rootfs"]["diff_ids"][0]
    return snapshots_pb2.PrepareSnapshotRequest(
        snapshotter="ember",
        key=f"extract-{case.name} {chain_id}",
        parent=parent,
        labels={
            "containerd.io/snapshot.ref": chain_id,
            "containerd.io/gc.root": "test",
            CRI + "image-ref": case.reference,
            CRI + "manifest-digest": digest(case.documents[-1]),
            CRI + "layer-digest": layers[0],
            CRI + "image-layers": ",".join(layers),
        },
    )


def see(at: Node, case: ImageCase) -> str:
    """Look at the image as a container would, waiting for its first pull; "" if all was right."""
    try:
        with at.mounted(case.chain_id) as root:
            name = max(case.rows)
            return ended_well(reader(root / name, sha256_of(case, name)))
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


@contextlib.contextmanager
def waiting(at: Node, case: ImageCase) -> Iterator[Future[str]]:
    """Somebody waits in Mounts for an image whose registry hangs, as long as the block lasts."""
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with ThreadPoolExecutor(1) as pool:
        with at.bed.registry.hanging():
            seeing = pool.submit(see, at, case)
            assert at.until(lambda: "seen-" in listed(at))
            yield seeing
        seeing.result(60)


def listed(at: Node) -> str:
    return at.containerd.ctr("snapshots", "--snapshotter", "ember", "ls")


def seconds_of_a_collection(at: Node) -> float:
    """What containerd's collector took; it needs every lock that there is."""
    began_s = time.monotonic()
    at.containerd.collect_garbage()
    return time.monotonic() - began_s


def test_collections_and_removals_go_on_while_a_first_pull_waits(at: Node) -> None:
    garbage, case = noisy("garbage", size=100_000), noisy("waited for", size=4_000_000)
    garbage.push(at.bed.registry)
    at.pull(garbage.reference)
    assert see(at, garbage) == ""
    with waiting(at, case) as seeing:
        assert [s for s in (seconds_of_a_collection(at) for _ in range(3)) if s > PROMPT_S] == []
        began_s = time.monotonic()
        at.containerd.remove_image(garbage.reference)
        assert garbage.chain_id not in listed(at)
        assert time.monotonic() - began_s < PROMPT_S
        assert not seeing.done()
        assert len(at.status()["indexing"]) == 2
    assert seeing.result() == ""
    assert case.chain_id in listed(at)
    at.containerd.remove_image(case.reference)
    assert left_behind(at, garbage.reference, case.reference) == []


def test_a_prepare_behind_a_registry_that_hangs_ends_and_so_does_the_collection_behind_it(
    at: Node,
) -> None:
    case = noisy("undecided", size=100_000)
    case.push(at.bed.registry)
    request = lowest_layer(case)
    with ThreadPoolExecutor(1) as pool, at.bed.registry.hanging():
        began_s = time.monotonic()
        preparing = pool.submit(at.prepare, request)
        assert not preparing.done()
        assert seconds_of_a_collection(at) < PREPARE_S
        mounts = preparing.result(PREPARE_S)
        assert time.monotonic() - began_s < PREPARE_S
        assert [mount.type for mount in mounts] == ["bind"]  # to be unpacked by containerd
        assert "no answer within" in at.image(case.reference)["reason"]
    at.remove_snapshot(request.key)
    assert left_behind(at, case.reference) == []


def test_an_image_that_is_removed_while_its_first_pull_goes_on_leaves_nothing(at: Node) -> None:
    case = noisy("removed early", size=4_000_000)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.bed.registry.hanging():
        began_s = time.monotonic()
        at.containerd.remove_image(case.reference)
        assert time.monotonic() - began_s < PROMPT_S
        assert len(at.status()["indexing"]) == 2
        kept = list(at.remove(case.reference).kept)
        assert sum("being indexed" in line for line in kept) == 2
    assert at.until(lambda: not at.status()["indexing"])
    assert left_behind(at, case.reference) == []


def test_a_stop_tells_those_who_wait_for_a_first_pull_and_waits_for_none_of_them(at: Node) -> None:
    case = noisy("stopped early", size=4_000_000)
    with waiting(at, case) as seeing:
        began_s = time.monotonic()
        at.ember.stop()
        assert time.monotonic() - began_s < PROMPT_S
        said = seeing.result(PROMPT_S)
        assert said.startswith("UNAVAILABLE: ")
        assert "this daemon is stopping; ask again when it is back" in said
        assert "Traceback" not in at.ember.log()
    at.start_again()
    assert see(at, case) == ""
    at.containerd.remove_image(case.reference)
    assert left_behind(at, case.reference) == []


def test_a_drain_says_why_it_does_not_get_on_and_ends_when_the_registry_is_back(at: Node) -> None:
    case = noisy("drained late", size=400_000)
    case.push(at.bed.registry)
    at.pull(case.reference)
    assert see(at, case) == ""
    assert not at.drop(case.reference).kept
    with at.mounted(case.chain_id), ThreadPoolExecutor(1) as pool:
        at.bed.registry.stop()
        draining = at.drain()
        told = pool.submit(lambda: next(each for each in draining if each.waiting))
        try:
            (first, *_) = told.result(30).waiting
            assert case.reference in first and "registry" in first
        finally:
            at.bed.registry.start()
        assert [each.views_left for each in draining][-1] == 0
    at.containerd.remove_image(case.reference)
    assert left_behind(at, case.reference) == []


def test_what_was_brought_of_a_removed_image_is_not_counted_to_its_next_pull(at: Node) -> None:
    case = noisy("counted anew", size=200_000)
    case.push(at.bed.registry)
    for _ in range(2):
        at.pull(case.reference)
        assert see(at, case) == ""
        layers = at.image(case.reference)["layers"]
        brought = [layer["tiers"]["registry"] for layer in layers]
        assert brought == [layer["size_bytes"] for layer in layers]
        at.containerd.remove_image(case.reference)
        assert left_behind(at, case.reference) == []
