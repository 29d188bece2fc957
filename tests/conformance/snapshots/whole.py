"""The whole daemon on a socket, for containerd's suite: ``python -m … ROOT SOCKET``.

Everything that runs on a node runs here too, guard and keeper included, on a state directory of
its own. Prints ``ready`` once it answers; SIGTERM ends it, and the keeper with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import uvloop

from ioengine import mounts
from ioengine.keeper import Keeper, KeeperError
from snapshotter.config import parse
from snapshotter.daemon import Daemon


def end_keeper(socket: Path) -> None:
    """No daemon comes after this one: what the keeper holds can go."""
    with contextlib.suppress(KeeperError):
        keeper = Keeper.connect(socket)
        keeper.drop(*keeper.names())
        keeper.quit()
        keeper.close()


async def main(root: Path, socket: Path) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    state = Path(tempfile.mkdtemp(prefix="ember-suite-"))
    settings = f'root = "{root}"\nstate = "{state}"\n[cache]\nballast = 0\n'
    daemon = Daemon(parse(settings, "suite"))
    try:
        await daemon.start()
        socket.symlink_to(state / "ember.sock")
        print("ready", flush=True)
        await stopped.wait()
    finally:
        await daemon.stop()
        end_keeper(state / "keeper.sock")
        mounts.unmount(state / "guarded", detach=True)
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    uvloop.run(main(*map(Path, sys.argv[1:])))
