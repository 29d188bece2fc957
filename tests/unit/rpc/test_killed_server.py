"""What must hold of a server that is killed with -9 under load: what it answered, it remembers."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from snapshotter.errors import NotFoundError
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc as pb_grpc
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.lazy import PlainOnly
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.model import Kind
from snapshotter.snapshots.snapshotter import Snapshotter

LIVES = 200


class Storm:
    """Snapshots that are prepared, committed and every third removed; each answer is kept."""

    def __init__(self, kill_after: int) -> None:
        self.prepared: set[int] = set()
        self.committed: set[int] = set()
        self.removing: set[int] = set()
        self.removed: set[int] = set()
        self.enough = asyncio.Event()
        self._kill_after = kill_after

    def answered(self, where: set[int], number: int) -> None:
        where.add(number)
        if len(self.prepared) + len(self.committed) + len(self.removed) >= self._kill_after:
            self.enough.set()

    async def life(self, stub: pb_grpc.SnapshotsStub, number: int) -> None:
        key, name = f"key {number}", f"name {number}"
        try:
            await stub.Prepare(pb.PrepareSnapshotRequest(key=key))
            self.answered(self.prepared, number)
            await stub.Commit(pb.CommitSnapshotRequest(name=name, key=key))
            self.answered(self.committed, number)
            if number % 3 == 0:
                self.removing.add(number)
                await stub.Remove(pb.RemoveSnapshotRequest(key=name))
                self.answered(self.removed, number)
        except grpc.aio.AioRpcError as error:
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def serve_and_kill(root: Path, storm: Storm) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.conformance.snapshots.serve",
        str(root),
        str(root / "s"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    async with grpc.aio.insecure_channel(f"unix:{root / 's'}") as channel:
        stub = pb_grpc.SnapshotsStub(channel)
        lives = [asyncio.create_task(storm.life(stub, number)) for number in range(LIVES)]
        await storm.enough.wait()
        process.send_signal(signal.SIGKILL)
        await asyncio.gather(*lives)
    await process.wait()


@pytest.mark.parametrize("kill_after", [5, 150, 350])
async def test_what_was_answered_before_a_kill_is_there_after_it(
    tmp_path: Path, kill_after: int
) -> None:
    storm = Storm(kill_after)
    await serve_and_kill(tmp_path, storm)
    database = await Database.open(tmp_path / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(database, tmp_path, PlainOnly())
    await snapshotter.start()
    for number in storm.committed - storm.removing:
        assert (await snapshotter.stat(f"name {number}")).kind is Kind.COMMITTED
    for number in storm.prepared - storm.committed:
        there = {info.name async for block in snapshotter.walk([]) for info in block}
        assert there & {f"key {number}", f"name {number}"}
    for number in storm.removed:
        with pytest.raises(NotFoundError):
            await snapshotter.stat(f"name {number}")
    infos = [info async for block in snapshotter.walk([]) for info in block]
    assert len(list((tmp_path / "snapshots").iterdir())) == len(infos)
    assert snapshotter.damaged == ()
    await snapshotter.close()
    await database.close()
