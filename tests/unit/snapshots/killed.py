"""Runs one verb in a child and kills it with SIGKILL before its first system call, second, third…

``python -m tests.unit.snapshots.killed BASELINE TARGET SCENARIO`` copies BASELINE to TARGET/1,
TARGET/2 and so on, one for each child, until a child gets to its end, and prints how many were
killed. A step is a call from Python into sqlite or a call that changes a directory; the profiler
sees them, so the code under test knows nothing of this.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

from snapshotter.errors import AlreadyExistsError
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from tests.fakes.lazy import FakeLazyLayers, digest

STEPS = {"execute", "executemany", "mkdir", "chmod", "chown", "rename", "unlink", "rmdir"}
CHAIN = str(digest("chain"))
MAX_STEPS = 500


class Killer:
    """Counts steps in all threads once armed; at number ``at`` the process dies."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._lock = threading.Lock()
        self.armed = False

    def profile(self, _frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or not self.armed or called.__name__ not in STEPS:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def prepare(snapshotter: Snapshotter) -> None:
    await snapshotter.prepare("new", "base", {"l": "1", "m": "2"})


async def commit(snapshotter: Snapshotter) -> None:
    await snapshotter.commit("name", "active", {"l": "new"})


async def remove(snapshotter: Snapshotter) -> None:
    await snapshotter.remove("active")


async def take(snapshotter: Snapshotter) -> None:
    try:
        await snapshotter.prepare("extract", "base", {"containerd.io/snapshot.ref": CHAIN})
    except AlreadyExistsError:
        return


async def nothing(_: Snapshotter) -> None:
    return


VERBS: dict[str, Callable[[Snapshotter], Awaitable[None]]] = {
    "prepare": prepare,
    "commit": commit,
    "remove": remove,
    "take": take,
    "start": nothing,
}


async def run(root: Path, scenario: str, killer: Killer) -> None:
    killer.armed = scenario == "start"
    database = await Database.open(root / "ember.db", [SCHEMA])
    lazy = FakeLazyLayers()
    lazy.taken = {CHAIN}
    snapshotter = Snapshotter(database, root, lazy, SnapshotterConfig(overlay_options=()))
    await snapshotter.start()
    killer.armed = True
    await VERBS[scenario](snapshotter)
    await snapshotter.close()
    await database.close()


def child(root: Path, scenario: str, at: int) -> None:
    killer = Killer(at)
    threading.setprofile(killer.profile)
    sys.setprofile(killer.profile)
    asyncio.run(run(root, scenario, killer))


def main(baseline: Path, target: Path, scenario: str) -> int:
    for at in range(1, MAX_STEPS):
        root = target / str(at)
        shutil.copytree(baseline, root)
        pid = os.fork()
        if pid == 0:
            child(root, scenario, at)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return at - 1
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"{scenario}: the child at step {at} failed by itself")
    raise SystemExit(f"{scenario}: not done after {MAX_STEPS} steps")


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
