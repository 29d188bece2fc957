"""Latency of the snapshot calls with few and with many snapshots, beside containerd's overlayfs.

Both are called through one containerd, so that its own bookkeeping, the same for both, is part of
both. Calls alternate between the two; what there is already does not change while it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import grpc

from bench.bed.bed import Bed
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings, percentile
from bench.progress import Progress
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc

SNAPSHOTTERS = ("ember", "overlayfs")
VERBS = ("Prepare", "Mounts", "Commit", "Remove")
FEW, MANY = 10, 10_000
ROUNDS = 300
KEPT = {"containerd.io/gc.root": "bench"}
TARGET = 1.2
FILLERS = 8
CALL_S = 30.0


class Calls:
    """The snapshot service of one containerd for one snapshotter, with a clock around each call."""

    def __init__(self, stub: snapshots_pb2_grpc.SnapshotsStub, name: str, namespace: str) -> None:
        self._stub = stub
        self._name = name
        self._metadata = (("containerd-namespace", namespace),)
        self.seconds: dict[str, list[float]] = {verb: [] for verb in VERBS}

    def call(self, verb: str, **fields: object) -> None:
        request = getattr(pb, f"{verb}SnapshotRequest", None) or getattr(pb, f"{verb}Request")
        message = request(snapshotter=self._name, **fields)
        start = time.perf_counter()
        getattr(self._stub, verb)(message, metadata=self._metadata, timeout=CALL_S)
        self.seconds[verb].append(time.perf_counter() - start)

    def fill(self, name: str) -> None:
        """One more snapshot that stays."""
        self.call("Prepare", key=f"{name}-key", labels=KEPT)
        self.call("Commit", name=name, key=f"{name}-key", labels=KEPT)

    def life(self, serial: int) -> None:
        """One snapshot on a parent, from Prepare to Remove."""
        key, name = f"active-{serial}", f"layer-{serial}"
        self.call("Prepare", key=key, parent="filler-0", labels=KEPT)
        self.call("Mounts", key=key)
        self.call("Commit", name=name, key=key, labels=KEPT)
        self.call("Remove", key=name)


def fill(calls: list[Calls], have: int, want: int) -> None:
    """Bring both to ``want`` snapshots that stay."""
    with ThreadPoolExecutor(FILLERS) as pool:
        for one in calls:
            list(pool.map(one.fill, (f"filler-{number}" for number in range(have, want))))


def measure(calls: list[Calls], rounds: int, serial: Callable[[], int]) -> None:
    for one in calls:
        one.life(serial())  # not counted: the first call opens what later ones find open
        one.seconds = {verb: [] for verb in VERBS}
    for number in range(rounds):
        for one in calls if number % 2 else calls[::-1]:
            one.life(serial())


def figures(calls: list[Calls], amount: int) -> list[Figure]:
    found = []
    for verb in VERBS:
        for title, share in (("p50", 0.5), ("p99", 0.99)):
            ours, theirs = (1000 * percentile(one.seconds[verb], share) for one in calls)
            found.append(
                Figure(
                    f"{verb} {title} with {amount:,}",
                    "ms",
                    ours,
                    theirs,
                    TARGET,
                    against="overlayfs",
                )
            )
    return found


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    many, rounds = (200, 20) if settings.quick else (MANY, ROUNDS)
    with Bed(Shape(0)) as bed:
        ember = bed.ember(settings.containerd)
        containerd = bed.containerd(
            settings.containerd, ember_socket=ember.socket, ember_root=ember.root
        )
        ember.start()
        with grpc.insecure_channel(f"unix:{containerd.address}") as channel:
            stub = snapshots_pb2_grpc.SnapshotsStub(channel)
            calls = [Calls(stub, name, bed.name) for name in SNAPSHOTTERS]
            serial = count().__next__
            have = 0
            for amount in (FEW, many):
                with say.step(f"making {amount:,} snapshots of each"):
                    fill(calls, have, amount)
                have = amount
                with say.step(f"{rounds} lives of a snapshot beside {amount:,}"):
                    measure(calls, rounds, serial)
                result.figures += figures(calls, amount)
                result.raw[str(amount)] = {
                    name: dict(one.seconds) for name, one in zip(SNAPSHOTTERS, calls, strict=True)
                }
    return result


CASE = Case("rpc", "latency of snapshot calls beside containerd's overlayfs", run)
