"""A place with views, a marked bind mount, a keeper and EROFS layers, taken apart at the end.

Reads of the layers are always a child process's work: a test that fails must not leave a thread
of its own waiting in the kernel.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ioengine import mounts
from ioengine.guard import Guard, Miss, Orphan
from ioengine.keeper import Keeper
from ioengine.probe_image import FILE_NAME, probe_image
from tests import patience

CHUNK_BYTES = 65_536
PATIENCE_S = 20.0


def content(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that another process does; assert that it came in time."""
    assert patience.until(holds, patience_s), f"did not come about: {what}"


class View:
    """A sparse view file with its content to be, and its bitmap."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.data = data
        with open(path, "wb") as file:
            file.truncate(len(data))
        self.inode = path.stat().st_ino
        self.bitmap = bytearray(-(-len(data) // CHUNK_BYTES) // 8 + 1)

    def fill(self, offset: int, length: int | None) -> None:
        """Write all chunks of the range through the unmarked path, then set their bits."""
        end = len(self.data) if length is None else min(offset + length, len(self.data))
        first, behind = offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        with open(self.path, "r+b") as file:
            file.seek(first * CHUNK_BYTES)
            file.write(self.data[first * CHUNK_BYTES : behind * CHUNK_BYTES])
        for number in range(first, behind):
            self.bitmap[number // 8] |= 1 << number % 8


class Bed:
    def __init__(self) -> None:
        # /tmp may be a tmpfs, which refuses pre-content marks.
        self.root = Path(tempfile.mkdtemp(prefix="ember-guard-", dir="/var/tmp"))
        self.views, self.guarded = self.root / "views", self.root / "guarded"
        self.layers = self.root / "layers"
        for path in (self.views, self.guarded, self.layers):
            path.mkdir()
        mounts.bind_private(self.views, self.guarded)
        self.socket = self.root / "keeper.sock"
        self.keeper = Keeper.connect_or_start(self.socket, cgroup=None)
        self.children: list[subprocess.Popen[bytes]] = []
        self.guards: list[Guard] = []

    def guard(self) -> Guard:
        guard = Guard.open(self.keeper, self.guarded)
        self.guards.append(guard)
        return guard

    def view(self, name: str, data: bytes) -> View:
        return View(self.views / name, data)

    def register(self, guard: Guard, view: View) -> None:
        guard.register(
            view.inode, view.bitmap, chunk_bytes=CHUNK_BYTES, length_bytes=len(view.data)
        )

    def mount(self, view: View, *, directio: bool = False) -> Path:
        """Mount an image over the view through the marked path; the file that shows its bytes."""
        layer = self.layers / view.path.name
        layer.mkdir()
        metadata = self.root / f"{view.path.name}.erofs"
        metadata.write_bytes(probe_image(len(view.data)))
        device = self.guarded / view.path.name
        mounts.mount_erofs(metadata, layer, [device], directio=directio)
        return layer / os.fsdecode(FILE_NAME)

    def child(self, *command: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.children.append(child)
        return child

    def script(self, text: str, *arguments: object) -> subprocess.Popen[bytes]:
        """A Python child; what it prints is its answer."""
        return self.child(sys.executable, "-I", "-c", text, *map(str, arguments))

    def reader(self, file: Path) -> subprocess.Popen[bytes]:
        return self.child("sha256sum", str(file))

    def close(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait(PATIENCE_S)
            assert child.stdout is not None
            child.stdout.close()
        for layer in self.layers.iterdir():
            mounts.unmount(layer, detach=True)
        for guard in self.guards:
            guard.close()
        mounts.unmount(self.guarded, detach=True)
        self.keeper.close()
        self.end_keeper()
        shutil.rmtree(self.root)

    def end_keeper(self) -> None:
        try:
            keeper = Keeper.connect(self.socket)
        except OSError:
            return
        keeper.drop(*keeper.names())
        keeper.quit()
        keeper.close()


def output(child: subprocess.Popen[bytes]) -> str:
    text, _ = child.communicate(timeout=PATIENCE_S)
    return text.decode().strip()


def collect(guard: Guard, count: int = 1) -> list[Miss]:
    """At least ``count`` misses, within the patience of a test."""
    misses: list[Miss] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(misses) < count:
        assert select.select([guard.fileno()], [], [], deadline - time.monotonic())[0]
        misses += guard.misses()
    return misses


class Server:
    """Fills and allows every miss of some views in a thread, as the daemon would."""

    def __init__(self, guard: Guard, *views: View) -> None:
        self.guard, self.views = guard, {view.inode: view for view in views}
        self.served: list[Miss] = []
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            ready = select.select([self.guard.fileno(), self._stop_read], [], [])[0]
            if self._stop_read in ready:
                return
            for miss in self.guard.misses():
                self.views[miss.inode].fill(miss.offset, miss.length)
                self.guard.allow(miss)
                self.served.append(miss)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(PATIENCE_S)
        os.close(self._stop_read)
        os.close(self._stop_write)


HOLDER = """
import os, select, sys
from pathlib import Path
from ioengine.guard import Guard
from ioengine.keeper import Keeper

guard = Guard.open(Keeper.connect(Path(sys.argv[1])), Path(sys.argv[2]))
own = [os.dup(0) for _ in range(200)]  # a daemon has more open than the process of the tests
guard.start()
print("started", flush=True)
while True:
    select.select([guard.fileno()], [], [])
    for miss in guard.misses():
        print("miss", miss.inode, miss.offset, miss.length, flush=True)
"""


class Holder:
    """Another process that takes events, answers none, and can be killed."""

    def __init__(self, bed: Bed) -> None:
        project = str(Path(__file__).resolve().parents[2])
        self._child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(bed.socket), str(bed.guarded)],
            stdout=subprocess.PIPE,
            bufsize=0,  # a line in a buffer here would be one that select() does not see
            env={**os.environ, "PYTHONPATH": project},
        )
        bed.children.append(self._child)
        assert self.line() == "started"

    def line(self) -> str:
        assert self._child.stdout is not None
        assert select.select([self._child.stdout], [], [], PATIENCE_S)[0]
        return self._child.stdout.readline().decode().strip()

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(PATIENCE_S)


def settle_all(guard: Guard, *views: View) -> list[Orphan]:
    """Fill each orphan's range in its view, or in all where it is not known in which."""
    orphans = list(guard.orphans)
    for orphan in orphans:
        for view in views:
            if orphan.inode in (None, view.inode):
                view.fill(orphan.offset, orphan.length)
        guard.settle(orphan)
    return orphans
