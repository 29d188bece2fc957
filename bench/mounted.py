"""An image's files under a path, by the snapshotter's own mounts, and ways to read them.

The mount is what a container would get (a view of the image's top layer), so that two snapshotters
are compared by what they give a container and not by how it is packed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.bed.containerd import Containerd
from bench.bed.process import BedError

PIECE_BYTES = 1 << 20
PAGE_BYTES = 4096
MOUNT_S = 300.0


@contextlib.contextmanager
def mounted(containerd: Containerd, reference: str, snapshotter: str) -> Iterator[Path]:
    """The files of a pulled image; unmounted, and its view removed, afterwards."""
    target = containerd.directory / f"mounted-{snapshotter}"
    target.mkdir(exist_ok=True)
    words = ["images", "mount", "--snapshotter", snapshotter, reference, str(target)]
    containerd.ctr(*words, timeout_s=MOUNT_S)
    try:
        yield target
    finally:
        containerd.ctr("images", "unmount", "--snapshotter", snapshotter, "--rm", str(target))


def large_files(root: Path, least_bytes: int, most: int) -> list[Path]:
    """The ``most`` largest regular files under ``root`` of at least ``least_bytes``."""
    found: list[tuple[int, str]] = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size >= least_bytes:
                found.append((status.st_size, path))
    if not found:
        raise BedError(f"{root}: no file of {least_bytes} bytes or more")
    return [Path(path) for _, path in sorted(found, reverse=True)[:most]]


def sequential(paths: Sequence[Path], limit_bytes: int | None = None) -> tuple[float, int]:
    """Read files one after the other, each up to ``limit_bytes``; seconds and bytes."""
    total = 0
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    start = time.perf_counter()
    for path in paths:
        left = limit_bytes if limit_bytes is not None else path.stat().st_size
        with path.open("rb", buffering=0) as file:
            while left > 0 and (got := file.readinto(buffer[: min(left, PIECE_BYTES)])):
                left -= got
                total += got
    return time.perf_counter() - start, total


def random_pages(path: Path, count: int, seed: int, limit_bytes: int | None = None) -> list[float]:
    """Read ``count`` single pages at random, without readahead; seconds of each."""
    pages = (limit_bytes or path.stat().st_size) // PAGE_BYTES
    numbers = random.Random(seed).sample(range(pages), min(count, pages))
    seconds = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for number in numbers:
            start = time.perf_counter()
            data = os.pread(descriptor, PAGE_BYTES, number * PAGE_BYTES)
            seconds.append(time.perf_counter() - start)
            if len(data) != PAGE_BYTES:
                raise BedError(f"{path}: {len(data)} bytes at page {number}")
    finally:
        os.close(descriptor)
    return seconds


def timed_command(words: Sequence[str | Path]) -> float:
    """Seconds that a command takes; BedError when it fails."""
    start = time.perf_counter()
    done = subprocess.run([str(word) for word in words], capture_output=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        said = done.stderr[-500:].decode(errors="replace")
        raise BedError(f"{words[0]}: exit status {done.returncode}: {said}")
    return seconds


def cached_bytes() -> int:
    """Page cache of the whole machine; only a difference on a quiet machine means something."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Cached:"):
            return int(line.split()[1]) * 1024
    raise BedError("/proc/meminfo has no line Cached")
