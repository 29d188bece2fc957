"""The daemon dies at a chosen place inside a verb, with lazy layers and a reader that waits.

containerd hears of it as of any crash. What must hold: the verb was done or not done, whoever does
it again succeeds, the reader sees no error, and in the end nothing is left of anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from bench.bed.process import BedError
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2, snapshots_pb2_grpc
from tests.cases.images import ImageCase
from tests.containers import left_behind
from tests.integration.test_waits import lowest_layer, see
from tests.node import Node, node
from tests.readers import (
    ended_well,
    noisy,
    reader,
    sha256_of,
)

pytestmark = [pytest.mark.root, pytest.mark.containerd]

WROTE = "Database._attempt"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemon dies: at an event of a function, once the verb has been entered."""

    verb: str
    function: str
    event: str

    def __str__(self) -> str:
        return f"{self.verb} at {self.event} of {self.function}"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("cache")) as made:
        yield made


@contextlib.contextmanager
def dying(at: Node, place: Place) -> Iterator[None]:
    """A daemon that dies at ``place`` in the block, and a sound one after it."""
    at.containerd.collect_garbage()  # so that it asks for no removal of its own meanwhile
    at.ember.stop()
    at.ember.program = ("tests.fakes.dying", place.verb, place.function, place.event)
    try:
        at.start_again()
        yield
        assert at.ember.wait_for_its_end() == -9
    finally:
        at.ember.program = ("snapshotter.cli.main",)
        at.ember.kill()
        at.start_again()


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (grpc.RpcError, BedError):
        return True
    return False


@dataclass(frozen=True, slots=True)
class Scene:
    """A lazy image that is mounted and waits to be read, and the names of all other images."""

    beside: ImageCase
    others: list[str] = field(default_factory=list)

    def add(self, at: Node, case: ImageCase) -> ImageCase:
        case.push(at.bed.registry)
        self.others.append(case.reference)
        return case


@pytest.fixture
def scene(at: Node) -> Iterator[Scene]:
    """In the end the reader must see what is right, and of all images nothing may be left."""
    case = noisy("beside", size=100_000)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    assert see(at, case) == ""
    # Somebody else's overlay on layers that are called as ours are may stand in the way a while.
    assert at.until(lambda: not at.drop(case.reference).kept)
    made, name = Scene(case), min(case.rows)
    with at.mounted(case.chain_id) as root:
        yield made
        assert ended_well(reader(root / name, sha256_of(case, name))) == ""
    for reference in made.others:
        with contextlib.suppress(BedError):
            at.containerd.remove_image(reference)
    assert left_behind(at, case.reference, *made.others) == []


IN_COMMIT = [Place("Snapshotter.commit", WROTE, event) for event in ("call", "return")]
IN_REMOVE = [
    Place("Snapshotter.remove", WROTE, "call"),
    Place("Snapshotter.remove", WROTE, "return"),
    Place("Snapshotter.remove", "LayerMounts._take_down", "call"),
    Place("Snapshotter.remove", "LayerMounts._take_down", "return"),
]
IN_PREPARE = [
    Place("Snapshotter.prepare", "Creator.take", "call"),
    Place("Creator.take", WROTE, "return"),
    Place("Creator.take", "SnapshotsService.Prepare", "return"),
]


def active_on(parent: str) -> snapshots_pb2.PrepareSnapshotRequest:
    request = snapshots_pb2.PrepareSnapshotRequest(snapshotter="ember", key="work", parent=parent)
    request.labels["containerd.io/gc.root"] = "test"
    return request


@pytest.mark.parametrize("place", IN_COMMIT, ids=str)
def test_a_kill_in_commit_on_lazy_layers(at: Node, scene: Scene, place: Place) -> None:
    at.prepare(active_on(scene.beside.chain_id))
    with dying(at, place):
        assert refused(lambda: at.commit("done", "work"))
    if refused(lambda: at.commit("done", "work")):  # it was done, and containerd was not told
        at.remove_snapshot("work")
        at.prepare(active_on(scene.beside.chain_id))
        at.commit("done", "work")
    name = max(scene.beside.rows)
    with at.mounted("done") as root:
        assert ended_well(reader(root / name, sha256_of(scene.beside, name))) == ""
    at.remove_snapshot("done")


@pytest.mark.parametrize("place", IN_REMOVE, ids=str)
def test_a_kill_in_the_removal_of_lazy_layers(at: Node, scene: Scene, place: Place) -> None:
    case = scene.add(at, noisy("removed", size=100_000))
    at.pull(case.reference)
    assert see(at, case) == ""
    with dying(at, place):
        at.containerd.remove_image(case.reference)
    assert at.pull(case.reference).lazy_layers == 2  # over what the kill has left
    assert see(at, case) == ""


@pytest.mark.parametrize("place", IN_PREPARE, ids=str)
def test_a_kill_in_the_prepare_that_takes_a_lazy_layer(
    at: Node, scene: Scene, place: Place
) -> None:
    case = scene.add(at, noisy("taken", size=100_000))
    with dying(at, place):
        assert refused(lambda: at.prepare(lowest_layer(case)))
    assert at.pull(case.reference).lazy_layers == 2
    assert see(at, case) == ""


def test_what_was_answered_before_a_kill_is_so_after_it(at: Node, scene: Scene) -> None:
    """AlreadyExists is a promise: containerd fetches nothing of that layer any more."""
    case = scene.add(at, noisy("promised", size=2_000_000))
    request = lowest_layer(case)
    del request.labels["containerd.io/gc.root"]
    chain_id = request.labels["containerd.io/snapshot.ref"]
    with grpc.insecure_channel(f"unix:{at.ember.socket}") as channel:
        ember = snapshots_pb2_grpc.SnapshotsStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            ember.Prepare(request, timeout=20)
        at.ember.kill()
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        at.start_again()
        info = ember.Stat(snapshots_pb2.StatSnapshotRequest(key=chain_id), timeout=20).info
        assert info.kind == snapshots_pb2.COMMITTED
        with pytest.raises(grpc.RpcError) as caught:
            ember.Prepare(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert at.pull(case.reference).lazy_layers == 2
    assert see(at, case) == ""
