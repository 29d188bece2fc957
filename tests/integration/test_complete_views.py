"""A layer that is complete costs its readers nothing, also those that were there before.

Counted are the guard's events: while something is missing every read of the layer's data raises
some, and from the last chunk on none does, in a file that is open and mapped, in a container that
runs, and under the next daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import drop_page_cache
from tests.containers import Container, build_program, crc_of, left_behind, reading_image
from tests.node import Node, node
from tests.readers import lazily, noisy, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

HOLDER = """\
import hashlib, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
shown = mmap.mmap(fd, size, prot=mmap.PROT_READ)
print("open", flush=True)
for line in sys.stdin:
    length = min(size, int(line))
    read = hashlib.sha256(b"".join(os.pread(fd, 65536, at) for at in range(0, length, 65536)))
    same = hashlib.sha256(shown[: -(-length // 65536) * 65536]).digest() == read.digest()
    shown.madvise(mmap.MADV_DONTNEED)
    print(read.hexdigest() if same else "differs", flush=True)
"""


class Holder:
    """A process that has a file open and mapped; it keeps no page of it between two reads."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", HOLDER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "open"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def read(self, length: int = 1 << 30) -> str:
        """The digest of the file's start, from where it lies and not from a cache."""
        drop_page_cache()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{length}\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, completion=False) as made:
        yield made


def events(at: Node) -> int:
    """How many the daemon's guard has been asked for since it began."""
    return int(at.status()["guard"]["events"])


def complete(at: Node, reference: str) -> None:
    """Bring the rest of what is mounted."""
    steps = list(at.drain())
    assert steps[-1].views_left == 0
    image = at.image(reference)
    assert image["here_bytes"] == image["plain_bytes"]


def test_a_read_of_many_pages_is_one_event(at: Node) -> None:
    case = noisy("pieces", size=700_000)
    lazily(at, case)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id) as root:
        path = root / max(case.rows)
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(2):  # to bring them, then of chunks that are here
                drop_page_cache()
                before = events(at)
                for place in (0, 262_144, 131_072):
                    assert len(os.pread(file.fileno(), 65_536, place)) == 65_536
                assert 3 <= events(at) - before <= 6


def test_the_last_chunk_ends_the_events_under_a_reader_that_is_there(at: Node) -> None:
    case = noisy("whole", size=700_000)
    lazily(at, case)
    assert at.pull(case.reference).lazy_layers == 2
    name = max(case.rows)
    with at.mounted(case.chain_id) as root:
        holder = Holder(root / name)
        try:
            first = holder.read(300_000)
            missed = events(at)
            assert holder.read(300_000) == first
            assert events(at) > missed > 0
            complete(at, case.reference)
            before = events(at)
            assert holder.read() == sha256_of(case, name)
            assert events(at) == before
            at.ember.kill()
            assert holder.read() == sha256_of(case, name)
            at.start_again()
            assert holder.read() == sha256_of(case, name)
            assert events(at) == 0
        finally:
            holder.end()
    assert left_behind(at, case.reference) == []


def test_a_running_container_reads_a_complete_image_without_events(
    at: Node, tmp_path: Path
) -> None:
    case = reading_image(build_program(tmp_path), "running")
    lazily(at, case)
    assert at.pull(case.reference).lazy_layers == 2
    container = Container(at, case.reference)
    try:
        assert container.read("/f0") == crc_of("running", 0)
        assert events(at) > 0
        complete(at, case.reference)
        before = events(at)
        for number in range(3):
            drop_page_cache()
            assert container.read(f"/f{number}") == crc_of("running", number)
        assert events(at) == before
        at.ember.stop()
        at.start_again()
        drop_page_cache()
        assert container.read("/f2") == crc_of("running", 2)
        assert events(at) == 0
    finally:
        container.remove()
