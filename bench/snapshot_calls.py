"""Latency of the snapshot verbs through containerd: Ember beside the built-in overlayfs.

Both are asked through the same containerd, call by call in turn, first with 10 snapshots on the
node and then with many; the client is containerd's own service. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.bed.link import Shape
from bench.bed.process import Server
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOTTERS = ("overlayfs", "ember")
VERBS = ("Prepare", "Mounts", "Stat", "Commit", "Remove")
FEW = 10
AT_ONCE = 32
KEEP = {"containerd.io/gc.root": "bench"}


class Caller:
    """One snapshotter behind containerd's service; every call's seconds are kept by verb."""

    def __init__(self, stub: Any, snapshotter: str, namespace: str) -> None:
        self._stub = stub
        self._snapshotter = snapshotter
        self._metadata = [("containerd-namespace", namespace)]
        self.seconds: dict[str, list[float]] = {}

    async def call(self, verb: str, request: Callable[..., Any], **fields: Any) -> None:
        send = getattr(self._stub, verb)
        start = time.perf_counter()
        await send(request(snapshotter=self._snapshotter, **fields), metadata=self._metadata)
        self.seconds.setdefault(verb, []).append(time.perf_counter() - start)

    async def round(self, name: str, parent: str) -> None:
        """One layer's life; what it leaves is removed again."""
        key = f"key {name}"
        await self.call("Prepare", pb.PrepareSnapshotRequest, key=key, parent=parent, labels=KEEP)
        await self.call("Mounts", pb.MountsRequest, key=key)
        await self.call("Stat", pb.StatSnapshotRequest, key=key)
        await self.call("Commit", pb.CommitSnapshotRequest, name=name, key=key, labels=KEEP)
        await self.call("Remove", pb.RemoveSnapshotRequest, key=name)

    async def fill(self, first: int, last: int) -> None:
        """Snapshots number ``first`` to ``last`` on one base."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                await self.call(
                    "Prepare",
                    pb.PrepareSnapshotRequest,
                    key=f"filler {number}",
                    parent="base",
                    labels=KEEP,
                )

        await asyncio.gather(*(one(number) for number in range(first, last)))

    async def base(self) -> None:
        await self.call("Prepare", pb.PrepareSnapshotRequest, key="base-key", labels=KEEP)
        await self.call(
            "Commit", pb.CommitSnapshotRequest, name="base", key="base-key", labels=KEEP
        )


async def measure(containerd: Containerd, many: int, samples: int) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(f"unix:{containerd.address}") as channel:
        stub = pb_grpc.SnapshotsStub(channel)
        callers = {name: Caller(stub, name, containerd.namespace) for name in SNAPSHOTTERS}
        result: dict[str, Any] = {}
        for caller in callers.values():
            await caller.base()
        filled = 1
        for count in (FEW, many):
            for caller in callers.values():
                await caller.fill(filled, count)
                caller.seconds.clear()
            filled = count
            for sample in range(samples):
                name = f"layer {count} {sample}"
                for caller in callers.values():
                    await caller.round(name, "base")
            result[f"{count} snapshots"] = {verb: compared(callers, verb) for verb in VERBS}
        return result


def compared(callers: dict[str, Caller], verb: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, caller in callers.items():
        cuts = statistics.quantiles(caller.seconds[verb], n=100)
        row[name] = {"p50_ms": round(cuts[49] * 1e3, 3), "p99_ms": round(cuts[98] * 1e3, 3)}
    for cut in ("p50_ms", "p99_ms"):
        row[f"ratio {cut[:3]}"] = round(row["ember"][cut] / row["overlayfs"][cut], 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--containerd", type=int, choices=(1, 2), default=1)
    arguments = parser.parse_args()
    with Bed(Shape(0)) as bed:
        root, socket = bed.directory / "ember", bed.directory / "ember.sock"
        root.mkdir()
        serve = [sys.executable, "-B", "-m", "tests.conformance.snapshots.serve"]
        log = bed.directory / "ember.log"
        server = Server("snapshots", [*serve, str(root), str(socket)], log=log, cwd=ROOT)
        try:
            server.wait_until(lambda: b"ready\n" in log.read_bytes())
            containerd = bed.containerd(arguments.containerd, ember_socket=socket, ember_root=root)
            measured = asyncio.run(measure(containerd, arguments.many, arguments.samples))
        finally:
            server.stop()
    print(json.dumps(measured, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
