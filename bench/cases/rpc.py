"""Latency of the snapshot calls with few and with many snapshots, beside containerd's overlayfs.

Both are called by the same client through a unix socket of their own, as containerd calls a proxy
snapshotter: Ember's, and one behind which containerd's overlayfs stands. Calls alternate between
the two, each waiting for the last; what there is already does not change while it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import grpc

from bench.bed.bed import Bed
from bench.bed.link import Shape
from bench.bed.overlayfs import Overlayfs
from bench.measure import Case, Figure, Result, Settings, percentile
from bench.progress import Progress
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc

VERBS = ("Prepare", "Mounts", "Commit", "Remove")
AMOUNTS = (10, 1_000, 10_000)
ROUNDS = 300
KEPT = {"containerd.io/gc.root": "bench"}
TARGET = 1.2
FILLERS = 8
CALL_S = 30.0
SETTLED_S = 2.0
"""What a snapshotter does behind its answers (measuring, deleting) is over by then."""


class Calls:
    """One snapshotter's service, with a clock around each call."""

    def __init__(self, stack: ExitStack, socket: Path, name: str, namespace: str) -> None:
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{socket}"))
        self._stub = snapshots_pb2_grpc.SnapshotsStub(channel)
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


def fill(calls: Sequence[Calls], have: int, want: int) -> None:
    """Bring all to ``want`` snapshots that stay."""
    with ThreadPoolExecutor(FILLERS) as pool:
        for one in calls:
            list(pool.map(one.fill, (f"filler-{number}" for number in range(have, want))))
    time.sleep(SETTLED_S)


def measure(calls: Sequence[Calls], rounds: int, serial: Callable[[], int]) -> None:
    for one in calls:
        one.life(serial())  # not counted: the first call opens what later ones find open
        one.seconds = {verb: [] for verb in VERBS}
    for number in range(rounds):
        for one in calls if number % 2 else calls[::-1]:
            one.life(serial())


def figures(
    ours: Calls, theirs: Calls, title: str, against: str, target: float | None
) -> list[Figure]:
    found = []
    for verb in VERBS:
        for cut, share in (("p50", 0.5), ("p99", 0.99)):
            a, b = (1000 * percentile(one.seconds[verb], share) for one in (ours, theirs))
            found.append(Figure(f"{verb} {cut} {title}", "ms", a, b, target, against=against))
    return found


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    amounts, rounds = ((10, 200), 20) if settings.quick else (AMOUNTS, ROUNDS)
    with Bed(Shape(0)) as bed, ExitStack() as stack:
        ember, overlayfs = bed.ember(settings.containerd), Overlayfs(bed.directory)
        containerd = bed.containerd(
            settings.containerd, ember_socket=ember.socket, ember_root=ember.root
        )
        ember.start()
        overlayfs.start()
        stack.callback(overlayfs.stop)
        places = ((ember.socket, "ember"), (overlayfs.socket, "overlayfs"))
        direct = [Calls(stack, socket, name, "bench") for socket, name in places]
        serial, have = count().__next__, 0
        for amount in amounts:
            with say.step(f"making {amount:,} snapshots of each"):
                fill(direct, have, amount)
            have = amount
            with say.step(f"{rounds} lives of a snapshot beside {amount:,}"):
                measure(direct, rounds, serial)
            title = f"with {amount:,}"
            result.figures += figures(direct[0], direct[1], title, "overlayfs on a socket", TARGET)
            result.raw[title] = {
                name: dict(one.seconds) for (_, name), one in zip(places, direct, strict=True)
            }
        names = ("ember", "overlayfs")
        within = [Calls(stack, containerd.address, name, bed.name) for name in names]
        fill(within, 0, 1)
        with say.step(f"{rounds} lives through containerd"):
            measure(within, rounds, serial)
        title = "through containerd"
        result.figures += figures(within[0], within[1], title, "overlayfs built in", None)
        result.raw[title] = {
            name: dict(one.seconds) for name, one in zip(names, within, strict=True)
        }
        result.notes.append(
            f"Through containerd: with {have:,} snapshots in Ember; its own overlayfs is a function"
            " call there, Ember a call through a socket, and containerd's own records are part of"
            " both."
        )
    return result


CASE = Case(
    "rpc",
    "latency of snapshot calls beside containerd's overlayfs",
    run,
    "at most 1.2 of overlayfs at p50 and p99, through the same kind of socket",
)
