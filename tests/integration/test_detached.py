"""Mounts that nobody finds any more while a process still reads through them, and cached zeros.

A lazily unmounted file system lives as long as it is used: its reads raise events that must be
answered, and after a loss of the guard it may hold zeros that no other mount may ever show.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import drop_page_cache
from ioengine.mounts import unmount
from tests.cases.images import ImageCase
from tests.containers import deleted_files, keepers, layer_mounts
from tests.integration.test_waits import see
from tests.node import Node, node
from tests.readers import ended_well, noisy, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

HOLDER = """\
import hashlib, os, sys
fds = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]
print("open", flush=True)
for line in sys.stdin:
    fd = fds[int(line)]
    os.lseek(fd, 0, os.SEEK_SET)
    print(hashlib.sha256(b"".join(iter(lambda: os.read(fd, 65536), b""))).hexdigest(), flush=True)
"""


class Holder:
    """A process that has files open and reads the one that it is told to."""

    def __init__(self, *paths: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "open"

    def begin(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def read(self, number: int) -> str:
        """The digest of the whole file, begun now."""
        self.begin(number)
        return self._line()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, sections={"fetch": {"readahead": 0}}) as made:
        yield made


def bring_lazily(at: Node, name: str) -> ImageCase:
    case = noisy(name, count=4, size=300_000)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    assert see(at, case) == ""
    assert at.until(lambda: not at.drop(case.reference).kept)
    return case


def test_who_reads_through_a_mount_that_was_detached_gets_right_bytes_to_the_end(
    at: Node,
) -> None:
    case = bring_lazily(at, "detached")
    names = sorted(case.rows)
    with at.mounted(case.chain_id) as root:
        holder = Holder(*(root / name for name in names))
        subprocess.run(["umount", "-l", str(root)], check=True)
        subprocess.run(["mount", "--bind", str(root), str(root)], check=True)
    try:
        for target in layer_mounts(at):
            unmount(target, detach=True)
        assert holder.read(0) == sha256_of(case, names[0])
        at.ember.kill()
        at.start_again()
        assert layer_mounts(at) == []
        assert holder.read(1) == sha256_of(case, names[1])
        reply = at.drop(case.reference)
        assert any("in use" in line for line in reply.kept)
        at.containerd.remove_image(case.reference)
        assert holder.read(2) == sha256_of(case, names[2])
        assert any("in use" in line for line in at.remove(case.reference).kept)
        assert holder.read(3) == sha256_of(case, names[3])
    finally:
        holder.end()
    assert at.until(lambda: not at.remove(case.reference).kept)
    assert list((at.ember.root / "views").iterdir()) == []
    assert deleted_files(at.ember.pid) == []


def test_zeros_that_a_reader_cached_while_no_guard_was_there_are_shown_by_no_other_mount(
    at: Node,
) -> None:
    case = bring_lazily(at, "zeros")
    names = sorted(case.rows)
    with at.mounted(case.chain_id) as root:
        at.ember.kill()
        for pid in keepers(at):
            os.kill(pid, signal.SIGKILL)
        holder = Holder(root / names[0])
        try:
            assert holder.read(0) != sha256_of(case, names[0])  # nobody is there to hold it up
            at.start_again()
            assert "restart its containers" in at.image(case.reference)["suspect"]
            assert see_all(at, case) == []
            at.ember.kill()
            at.start_again()
            assert "restart its containers" in at.image(case.reference)["suspect"]
            assert see_all(at, case) == []
            at.ember.complete()
            drop_page_cache()
            assert see_all(at, case) == []
        finally:
            holder.end()
    at.containerd.remove_image(case.reference)
    assert at.until(lambda: layer_mounts(at) == [])
    assert at.pull(case.reference).lazy_layers == 2
    assert at.image(case.reference)["suspect"] == ""
    assert see_all(at, case) == []


def see_all(at: Node, case: ImageCase) -> list[str]:
    """What readers of every file of a new mount have to complain of."""
    with at.mounted(case.chain_id) as root:
        readers = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
        return [said for said in map(ended_well, readers) if said]
