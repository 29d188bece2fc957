"""The whole daemon on a small disk that is full: clear errors, nothing lost, and healed by space.

The disk is filled without writing to it, and freed by removing one file, as an operator would.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bench.bed.process import BedError
from ioengine.mounts import unmount
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2, snapshots_pb2_grpc
from tests.cases.images import ImageCase, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.containers import layer_mounts
from tests.integration.test_daemon_manners import node_on, small_ext4
from tests.integration.test_first_pull_modes import is_indexed
from tests.integration.test_waits import listed, see
from tests.node import Node, words_of
from tests.readers import ended_well, noisy, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

MIB = 2**20
HEALED_S = 30.0
FULL = "no space"
NO_BALLAST = "[cache]\nballast = 0\nflush_interval = 0.5\n"


@dataclass(frozen=True, slots=True)
class Disk:
    """A small file system and what takes all of its room."""

    root: Path

    @property
    def filler(self) -> Path:
        return self.root / "filler"

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all but ``leave_bytes``."""
        descriptor = os.open(self.filler, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for step in (MIB, 1024):
                with contextlib.suppress(OSError):
                    while True:
                        size = os.fstat(descriptor).st_size
                        os.posix_fallocate(descriptor, size, step)
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - leave_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free(self) -> None:
        self.filler.unlink()
        os.sync()


@contextlib.contextmanager
def small_node(
    tmp_path: Path, more: str = NO_BALLAST, size_bytes: int = 64 * MIB
) -> Iterator[tuple[Node, Disk]]:
    """A node whose cache is on a disk of its own."""
    with (
        small_ext4(tmp_path, size_bytes) as root,
        node_on(tmp_path / "cache", root, more) as at,
    ):
        yield at, Disk(root)


def pulled(at: Node, case: ImageCase) -> bool:
    """Whether a pull worked; without room it says so."""
    try:
        return at.pull(case.reference).layers > 0
    except grpc.RpcError as error:
        assert FULL in words_of(error).lower()
        return False


def files(root: Path, *folders: str) -> list[str]:
    return [path.name for folder in folders for path in (root / folder).iterdir()]


def single(name: str, size: int) -> ImageCase:
    """An image of one layer: what stands on it is found by its device, not by names."""
    data = random.Random(name).randbytes(size)
    return image(name, [gzipped(layer(file(b"only", data)))], {"only": is_file(data)})


def forget_bytes(at: Node) -> None:
    """Let all views be empty, their indexes here."""
    at.ember.stop()
    for target in layer_mounts(at):
        unmount(target, detach=True)
    for folder in ("views", "presence"):
        for path in (at.ember.root / folder).iterdir():
            path.unlink()
    at.start_again()


def lower(call: Callable[[], object]) -> str:
    """What a user reads of a call that must fail."""
    with pytest.raises((grpc.RpcError, BedError)) as caught:
        call()
    error = caught.value
    return (words_of(error) if isinstance(error, grpc.RpcError) else str(error)).lower()


def test_a_first_pull_that_is_streamed_to_a_full_disk_fails_clearly_and_works_with_space(
    tmp_path: Path,
) -> None:
    here, comes = noisy("here", size=300_000), noisy("comes", size=1_000_000)
    with small_node(tmp_path) as (at, disk):
        for case in (here, comes):
            case.push(at.bed.registry)
        at.pull(here.reference)
        with at.mounted(here.chain_id) as root:
            disk.fill()
            assert FULL in lower(lambda: at.pull(comes.reference))
            disk.filler.unlink()
            disk.fill(MIB)
            assert at.until(lambda: pulled(at, comes), HEALED_S)
            assert FULL in see(at, comes).lower()
            assert FULL in at.ember.log().lower()
            states = {layer["state"].lower() for layer in at.image(comes.reference)["layers"]}
            assert any(FULL in state for state in states)
            assert [name for name in files(disk.root, "index") if "tmp" in name] == []
            assert files(disk.root, "staging") == []
            for name in here.rows:
                assert ended_well(reader(root / name, sha256_of(here, name))) == ""
            disk.free()
            assert at.until(lambda: see(at, comes) == "", HEALED_S)
            assert "Traceback" not in at.ember.log()


def test_a_pull_that_is_unpacked_to_a_full_disk_leaves_nothing_and_works_with_space(
    tmp_path: Path,
) -> None:
    case = noisy("unpacked", size=1_000_000)
    with small_node(tmp_path) as (at, disk):
        text = at.ember.configuration.read_text()
        at.ember.configuration.write_text(text.replace('"stream"', '"overlay"'))
        at.ember.stop()
        at.start_again()
        case.push(at.bed.registry)
        disk.fill()
        assert FULL in lower(lambda: at.pull(case.reference))
        at.containerd.collect_garbage()
        assert "extract" not in listed(at)
        disk.free()
        assert at.pull(case.reference).layers == 2
        assert at.until(lambda: is_indexed(at, case), HEALED_S)
        assert see(at, case) == ""


def test_a_database_on_a_full_disk_forgets_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    with (
        small_node(tmp_path) as (at, disk),
        grpc.insecure_channel(f"unix:{at.ember.socket}") as channel,
    ):
        stub = snapshots_pb2_grpc.SnapshotsStub(channel)
        for n in range(8):
            stub.Prepare(snapshots_pb2.PrepareSnapshotRequest(key=f"key {n}"), timeout=10)
        disk.fill()
        acknowledged: dict[int, str] = {}
        said = ""
        for n in range(8000):
            info = snapshots_pb2.Info(name=f"key {n % 8}")
            info.labels.update({f"label {x}": f"{n} {x}".ljust(3000, ".") for x in range(8)})
            try:
                stub.Update(snapshots_pb2.UpdateSnapshotRequest(info=info), timeout=10)
            except grpc.RpcError as error:
                said = f"{error.code().name} {error.details()}"
                break
            acknowledged[n % 8] = f"{n} 0"
        assert said.startswith("RESOURCE_EXHAUSTED no room")
        stub.Remove(snapshots_pb2.RemoveSnapshotRequest(key="key 7"), timeout=10)
        at.ember.kill()
        at.start_again()
        for n in range(7):
            info = stub.Stat(snapshots_pb2.StatSnapshotRequest(key=f"key {n}"), timeout=10).info
            assert info.labels["label 0"].startswith(acknowledged[n] + ".")
        assert "key 7" not in {
            info.name
            for block in stub.List(snapshots_pb2.ListSnapshotsRequest(), timeout=10)
            for info in block.info
        }
        disk.free()
        at.ember.stop()
        at.start_again()
        stub.Prepare(snapshots_pb2.PrepareSnapshotRequest(key="again"), timeout=10)


def test_a_daemon_starts_on_a_full_disk_and_serves_what_is_here(tmp_path: Path) -> None:
    case = noisy("full start", size=300_000)
    with small_node(tmp_path) as (at, disk):
        case.push(at.bed.registry)
        at.pull(case.reference)
        assert see(at, case) == ""
        with at.mounted(case.chain_id) as root:
            for end in (at.ember.stop, at.ember.kill):
                end()
                disk.fill()
                at.start_again()
                for name in case.rows:
                    assert ended_well(reader(root / name, sha256_of(case, name))) == ""
        disk.free()
        assert see(at, case) == ""


def test_waiting_readers_get_the_ballast_of_a_full_disk_and_it_grows_back(tmp_path: Path) -> None:
    case = single("ballast", 6_000_000)
    more = f"[cache]\nballast = {16 * MIB}\nflush_interval = 0.5\n"
    with small_node(tmp_path, more, 400 * MIB) as (at, disk):
        ballast = disk.root / "ballast"
        assert at.until(lambda: ballast.stat().st_size == 16 * MIB)
        case.push(at.bed.registry)
        at.pull(case.reference)
        assert see(at, case) == ""
        forget_bytes(at)
        with at.mounted(case.chain_id) as root:
            disk.fill()
            for name in case.rows:
                assert ended_well(reader(root / name, sha256_of(case, name))) == ""
            assert "of ballast released for waiting readers" in at.ember.log()
            assert 0 < ballast.stat().st_size < 16 * MIB
            at.ember.kill()
            at.start_again()
            for name in case.rows:
                assert ended_well(reader(root / name, sha256_of(case, name))) == ""
            disk.free()
            assert at.until(lambda: ballast.stat().st_size == 16 * MIB, HEALED_S)
