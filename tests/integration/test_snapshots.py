"""What must hold with a real containerd, 1.6 and 2.x: Ember as a complete overlay snapshotter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.bed.process import BedError, Server, run
from bench.bed.tiny import tiny_image
from tests.patience import until
from tests.treecheck import Rows, compare, walk

pytestmark = [pytest.mark.root, pytest.mark.containerd]
ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 20
T = TypeVar("T")


class Snapshots:
    """The snapshotter alone on its socket; what lies in ``layers`` need not be unpacked."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "ember"
        self.socket = directory / "ember.sock"
        self.layers = directory / "layers"
        self.layers.mkdir()
        self.root.mkdir()
        self._log = directory / "ember.log"
        self._server: Server | None = None

    def start(self) -> None:
        self._log.write_bytes(b"")
        self._server = Server(
            "snapshots",
            [
                sys.executable,
                "-B",
                "-m",
                "tests.conformance.snapshots.serve",
                str(self.root),
                str(self.socket),
                str(self.layers),
            ],
            log=self._log,
            cwd=ROOT,
        )
        self._server.wait_until(lambda: b"ready\n" in self._log.read_bytes())

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def directories(self) -> list[str]:
        return sorted(path.name for path in (self.root / "snapshots").iterdir())

    def trash(self) -> list[str]:
        return [path.name for path in (self.root / "trash").iterdir()]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image")


@pytest.fixture(scope="module")
def image(trees: Path) -> Image:
    return tiny_image(trees, layers=4)


@pytest.fixture
def bed(tmp_path: Path, image: Image) -> Iterator[Bed]:
    with Bed(Shape(0), cache=tmp_path) as made:
        image.push(made.registry)
        yield made


@pytest.fixture
def snapshots(bed: Bed) -> Iterator[Snapshots]:
    made = Snapshots(bed.directory)
    made.start()
    yield made
    made.stop()


@pytest.fixture(params=[1, 2])
def containerd(bed: Bed, snapshots: Snapshots, request: pytest.FixtureRequest) -> Containerd:
    major: int = request.param
    return bed.containerd(major, ember_socket=snapshots.socket, ember_root=snapshots.root)


def unpack(image: Image, snapshots: Snapshots, trees: Path, numbers: Sequence[int]) -> None:
    """Lay layers ready, as if they had come lazily."""
    for number in numbers:
        name = image.layers[number].digest.removeprefix("sha256:")
        shutil.copytree(trees / f"tree{number}", snapshots.layers / name)


def claims(snapshots: Snapshots) -> list[dict[str, Any]]:
    lines = (snapshots.layers / "claims.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def await_that(holds: Callable[[], bool], what: str) -> None:
    assert until(holds, 20), what


def once_connected(act: Callable[[], T]) -> T:
    """After a restart of the snapshotter containerd dials again in its own time."""
    answers: list[T] = []

    def answered() -> bool:
        try:
            answers.append(act())
        except BedError as error:
            if not re.search("connection (error|closed)|error reading from server", str(error)):
                raise
        return bool(answers)

    assert until(answered), "containerd does not reach the snapshotter"
    return answers[0]


def listed(containerd: Containerd) -> list[str]:
    """What containerd lists of its namespace."""
    words = ["snapshots", "--snapshotter", "ember", "ls"]
    return once_connected(lambda: containerd.ctr(*words).splitlines())


def shown(containerd: Containerd, image: Image, snapshotter: str, place: Path) -> Rows:
    """The whole tree of an image as a snapshotter shows it."""
    place.mkdir()
    words = ["images", "mount", "--snapshotter", snapshotter, image.reference, str(place)]
    containerd.ctr(*words)
    try:
        return walk(place)
    finally:
        run(["umount", place])


def test_a_container_starts_and_its_tree_is_that_of_overlayfs(
    containerd: Containerd, image: Image, tmp_path: Path
) -> None:
    containerd.pull(image.reference, "ember")
    assert containerd.start_container(image.reference, snapshotter="ember").output == "ready\n"
    containerd.pull(image.reference, "overlayfs")
    expected = shown(containerd, image, "overlayfs", tmp_path / "overlayfs")
    actual = shown(containerd, image, "ember", tmp_path / "ember")
    assert len(actual) > 5
    assert compare(expected, actual) == []


def test_removing_the_image_frees_the_disk_through_containerds_collection(
    containerd: Containerd, image: Image, snapshots: Snapshots
) -> None:
    containerd.pull(image.reference, "ember")
    assert len(snapshots.directories()) == len(image.layers)
    usage = containerd.ctr("snapshots", "--snapshotter", "ember", "usage").splitlines()
    assert len(usage) == len(image.layers) + 1
    containerd.remove_image(image.reference)
    await_that(lambda: snapshots.directories() == [], "layers stay")
    await_that(lambda: snapshots.trash() == [], "the trash is not emptied")


def test_a_running_container_and_its_files_outlive_kill_9_of_the_snapshotter(
    containerd: Containerd, image: Image, snapshots: Snapshots
) -> None:
    containerd.pull(image.reference, "ember")
    before = listed(containerd)

    def restart() -> None:
        snapshots.kill()
        snapshots.start()

    started = containerd.start_container(image.reference, snapshotter="ember", when_ready=restart)
    assert started.output == "ready\n"
    await_that(lambda: listed(containerd) == before, "the container's snapshot stays")
    assert containerd.start_container(image.reference, snapshotter="ember").output == "ready\n"


def test_containerd_that_is_killed_finds_all_again(
    containerd: Containerd, image: Image, snapshots: Snapshots
) -> None:
    containerd.pull(image.reference, "ember")
    containerd.kill()
    containerd.start()
    assert containerd.start_container(image.reference, snapshotter="ember").output == "ready\n"
    containerd.remove_image(image.reference)
    await_that(lambda: snapshots.directories() == [], "layers stay")


def test_twenty_clients_pull_at_once(
    containerd: Containerd, image: Image, snapshots: Snapshots
) -> None:
    words = ["images", "pull", "--snapshotter", "ember"]
    words += ["--plain-http"] if containerd.major == 2 else []
    clients = [
        subprocess.Popen(
            containerd.command(*words, image.reference),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for _ in range(CLIENTS)
    ]
    faults = [client.communicate(timeout=120)[1] for client in clients]
    assert [fault for client, fault in zip(clients, faults, strict=True) if client.returncode] == []
    committed = [line for line in listed(containerd) if "Committed" in line]
    assert len(committed) == len(image.layers)
    assert containerd.start_container(image.reference, snapshotter="ember").output == "ready\n"
    containerd.remove_image(image.reference)
    await_that(lambda: snapshots.directories() == [], "layers stay")


def test_a_second_namespace_shares_the_layers_where_containerd_asks(
    containerd: Containerd, image: Image, snapshots: Snapshots
) -> None:
    containerd.pull(image.reference, "ember")
    first = containerd.namespace
    containerd.namespace = f"{first}-other"
    try:
        containerd.pull(image.reference, "ember")
        # ctr 1.6 unpacks without the label that says which layer it is.
        copies = 2 if containerd.major == 1 else 1
        assert len(snapshots.directories()) == len(image.layers) * copies
        containerd.remove_image(image.reference)
    finally:
        containerd.namespace = first
    assert containerd.start_container(image.reference, snapshotter="ember").output == "ready\n"


def test_a_pull_that_was_cut_off_succeeds_when_tried_again(
    containerd: Containerd, image: Image, snapshots: Snapshots
) -> None:
    snapshots.stop()
    with pytest.raises(BedError):
        containerd.pull(image.reference, "ember")
    snapshots.start()
    once_connected(lambda: containerd.pull(image.reference, "ember"))
    assert containerd.start_container(image.reference, snapshotter="ember").output == "ready\n"


@pytest.fixture
def containerd2(bed: Bed, snapshots: Snapshots) -> Containerd:
    """Only 2.x says by itself which layer it is about to fetch."""
    return bed.containerd(2, ember_socket=snapshots.socket, ember_root=snapshots.root)


def test_layers_that_are_provided_are_not_fetched(
    containerd2: Containerd, bed: Bed, image: Image, snapshots: Snapshots, trees: Path
) -> None:
    unpack(image, snapshots, trees, range(4))
    before = bed.registry.sent_bytes()
    containerd2.pull(image.reference, "ember")
    assert bed.registry.sent_bytes() - before < 20_000 < image.size
    assert containerd2.start_container(image.reference, snapshotter="ember").output == "ready\n"
    asked = claims(snapshots)
    assert [claim["layer_digest"] for claim in asked] == [layer.digest for layer in image.layers]
    assert [claim["diff_id"] for claim in asked] == [layer.diff_id for layer in image.layers]
    assert asked[0]["image_layers"] == [layer.digest for layer in image.layers]
    assert {claim["image_ref"] for claim in asked} == {image.reference}
    assert {claim["namespace"] for claim in asked} == {containerd2.namespace}
    assert asked[3]["below"] == [claim["chain_id"] for claim in asked[:3]]
    containerd2.remove_image(image.reference)
    await_that(lambda: snapshots.directories() == [], "layers stay")
    assert (snapshots.layers / image.layers[0].digest.removeprefix("sha256:") / "program").exists()


def test_layers_above_one_that_is_not_provided_are_unpacked_onto_it(
    containerd2: Containerd, image: Image, snapshots: Snapshots, trees: Path, tmp_path: Path
) -> None:
    unpack(image, snapshots, trees, [0, 1])
    containerd2.pull(image.reference, "ember")
    assert containerd2.start_container(image.reference, snapshotter="ember").output == "ready\n"
    containerd2.pull(image.reference, "overlayfs")
    expected = shown(containerd2, image, "overlayfs", tmp_path / "overlayfs")
    actual = shown(containerd2, image, "ember", tmp_path / "ember")
    departures = [line for line in compare(expected, actual) if "mtime" not in line]
    assert departures == []


def test_provided_layers_survive_kill_9_of_the_snapshotter(
    containerd2: Containerd, image: Image, snapshots: Snapshots, trees: Path
) -> None:
    unpack(image, snapshots, trees, range(4))
    containerd2.pull(image.reference, "ember")
    snapshots.kill()
    snapshots.start()
    once_connected(lambda: containerd2.ctr("snapshots", "--snapshotter", "ember", "usage"))
    assert containerd2.start_container(image.reference, snapshotter="ember").output == "ready\n"
    containerd2.pull(image.reference, "ember")
