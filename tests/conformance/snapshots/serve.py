"""A snapshotter on a socket, for suites that speak gRPC: ``python -m … ROOT SOCKET``.

Prints ``ready`` once it answers; SIGTERM ends it cleanly. Layers are plain: no registry is asked.
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


async def main(root: Path, socket: Path) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    database = await Database.open(root / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(database, root, PlainOnly())
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
    uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
