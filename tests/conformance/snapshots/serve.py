"""A snapshotter on a socket, for suites that speak gRPC: ``python -m … ROOT SOCKET [LAYERS]``.

Prints ``ready`` once it answers; SIGTERM ends it cleanly. No registry is asked: layers are plain,
but for those that lie unpacked in the folder LAYERS, named by their digests.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop

from snapshotter.rpc.server import RpcServer
from snapshotter.rpc.snapshots import SnapshotsService, register
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.lazy import PlainOnly
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.snapshotter import Snapshotter
from tests.fakes.unpacked import UnpackedLayers


async def main(root: Path, socket: Path, layers: Path | None = None) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    database = await Database.open(root / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(database, root, UnpackedLayers(layers) if layers else PlainOnly())
    await snapshotter.start()
    server = RpcServer(socket, [partial(register, SnapshotsService(snapshotter))])
    await server.start()
    print("ready", flush=True)
    await stopped.wait()
    await server.stop()
    await snapshotter.close()
    await database.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    uvloop.run(main(*map(Path, sys.argv[1:])))
