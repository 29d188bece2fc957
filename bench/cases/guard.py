"""What the guard costs: a read of a present chunk through the marked mount, against the same read
past it.

Reads are of single cached pages, so that there is hardly anything to them but the guard; a file
system above reads far larger pieces, and only what its own page cache lacks. Ways take turns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.bed.bed import BASE
from bench.bed.leftovers import lock
from bench.bed.process import BedError
from bench.measure import Case, Figure, Result, Settings, alternate, medians
from bench.progress import Progress
from ioengine import mounts
from ioengine.guard import Guard
from ioengine.keeper import Keeper

CHUNK_BYTES = 65_536
CHUNKS = 256
READS = 20_000
CROWD = 8
READ_S = 120.0
READER = """\
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
count, size = int(sys.argv[2]), os.fstat(fd).st_size
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
piece = bytearray(4096)
pages = [(n * 7919 * 4096) % size for n in range(count)]
os.preadv(fd, [piece], 0)
sys.stdout.write("open\\n")
sys.stdout.flush()
sys.stdin.readline()
begin = time.perf_counter()
for at in pages:
    os.preadv(fd, [piece], at)
print(time.perf_counter() - begin)
"""


class Place:
    """A file whose chunks are all here, a marked bind mount of its folder, and a guard."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.views, self.guarded = root / "views", root / "guarded"
        for path in (self.views, self.guarded):
            path.mkdir()
        (self.views / "v").write_bytes(os.urandom(CHUNKS * CHUNK_BYTES))
        mounts.bind_private(self.views, self.guarded)
        self.keeper = Keeper.connect_or_start(root / "keeper.sock", cgroup=None)
        self.guard = Guard.open(self.keeper, self.guarded)
        bitmap = bytearray(b"\xff" * (CHUNKS // 8))
        self.guard.register(
            (self.views / "v").stat().st_ino,
            bitmap,
            chunk_bytes=CHUNK_BYTES,
            length_bytes=CHUNKS * CHUNK_BYTES,
        )

    def close(self) -> None:
        self.guard.close()
        mounts.unmount(self.guarded, detach=True)
        self.keeper.drop(*self.keeper.names())
        self.keeper.quit()
        self.keeper.close()
        shutil.rmtree(self.root)


@contextmanager
def place() -> Iterator[Place]:
    BASE.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="guard-", dir=BASE))
    # What has no lock there is taken for what a killed run has left, by whoever starts next.
    held = lock(root)
    made = Place(root)
    try:
        yield made
    finally:
        made.close()
        if held is not None:
            os.close(held)


def read(path: Path, readers: int, reads: int) -> float:
    """Seconds that ``readers`` processes took, each for ``reads`` reads, all at once: the mean."""
    command = [sys.executable, "-I", "-c", READER, str(path), str(reads)]
    there = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(readers)
    ]
    try:
        for reader in there:
            if reader.stdout is None or reader.stdout.readline() != "open\n":
                raise BedError(f"{path}: a reader did not come to it")
        for reader in there:
            assert reader.stdin is not None
            reader.stdin.write("go\n")
            reader.stdin.flush()
        said = [reader.communicate(timeout=READ_S)[0] for reader in there]
    finally:
        for reader in there:
            reader.kill()
            reader.wait()
    return sum(float(text) for text in said) / readers


def thread_seconds() -> float:
    """Processor time that the guard's thread has taken."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "ember-guard":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise BedError("the guard's thread is not running")


def compare(
    at: Place, marked: str, readers: int, settings: Settings, say: Progress
) -> tuple[dict[str, list[float]], float]:
    """Microseconds a read by way, and those of the guard's thread an event."""
    reads = (READS if not settings.quick else 500) // readers
    taken: list[float] = []

    def guarded() -> float:
        events, begin = at.guard.counts().events, thread_seconds()
        seconds = read(at.guarded / "v", readers, reads)
        events = at.guard.counts().events - events
        if events:
            taken.append((thread_seconds() - begin) / events * 1e6)
        return seconds / reads * 1e6

    def unmarked() -> float:
        return read(at.views / "v", readers, reads) / reads * 1e6

    ways: dict[str, Callable[[], float]] = {marked: guarded, "unmarked": unmarked}
    values = alternate(ways, settings.rounds, say)
    return values, medians({"event": taken})["event"] if taken else 0.0


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    with place() as at:
        at.guard.start()
        for title, readers in (("1 reader", 1), (f"{CROWD} readers", CROWD)):
            values, event_us = compare(at, "events", readers, settings, say)
            result.raw[title] = values
            middle = medians(values)
            per_read = Figure(
                f"{title}: read of a present page",
                "µs",
                middle["events"],
                middle["unmarked"],
                against="unmarked",
            )
            result.figures += [
                per_read,
                Figure(f"{title}: guard's thread, one core", "events/s", 1e6 / event_us),
            ]
        before = at.guard.counts().events
        at.guard.ignore(at.views / "v")
        values, _ = compare(at, "ignored", 1, settings, say)
        result.raw["complete"] = values
        middle = medians(values)
        result.figures.append(
            Figure(
                "complete: read through the marked mount",
                "µs",
                middle["ignored"],
                middle["unmarked"],
                against="unmarked",
            )
        )
        result.notes.append(
            f"{READS} reads of cached pages of 4 KiB; events of the complete file:"
            f" {at.guard.counts().events - before}. A layer's mount adds these costs only where its"
            " own page cache lacks something, and none where it is mounted past the mark."
        )
    return result


CASE = Case(
    "guard",
    "what the guard costs a read of a present chunk",
    run,
    "none here: `present` holds what a reader notices of it",
)
