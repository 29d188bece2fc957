"""Reads through EROFS over a marked view: they wait, they get right bytes, and errors do not stay.

Runs against the real kernel: fanotify pre-content events and file-backed EROFS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ioengine import mounts
from ioengine.guard import Guard
from tests.integration.guard_bed import (
    CHUNK_BYTES,
    Bed,
    Server,
    collect,
    content,
    output,
    sha256,
    until,
)
from tests.patience import waits_for_bytes

pytestmark = pytest.mark.root
MIB = 1 << 20

READ_AT = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
for offset in map(int, sys.argv[2:]):
    try:
        print(os.pread(fd, 16, offset).hex(), flush=True)
    except OSError as error:
        print("errno", error.errno, flush=True)
"""


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    try:
        yield bed
    finally:
        bed.close()


def test_a_read_of_a_hole_waits_and_then_gets_the_right_bytes(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB + 3 * 512))
    bed.register(guard, view)
    guard.start()
    reader = bed.reader(bed.mount(view))
    first = collect(guard)[0]
    assert first.inode == view.inode and first.known
    assert reader.poll() is None
    view.fill(first.offset, first.length)
    guard.allow(first)
    with Server(guard, view):
        assert output(reader).split()[0] == sha256(view.data)
    assert guard.counts().outstanding == 0


def test_present_chunks_are_answered_while_python_holds_the_gil(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    view.fill(0, MIB)
    bed.register(guard, view)
    guard.start()
    file = bed.mount(view)
    text = "import sys, time; t = time.monotonic(); open(sys.argv[1], 'rb').read(); " + (
        "print(time.monotonic() - t)"
    )
    reader = bed.script(text, file)
    ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL: the GIL is not given up
    assert float(output(reader)) < 1.0
    counts = guard.counts()
    assert counts.allowed == counts.events > 0 and counts.misses == 0


def test_a_reader_in_order_is_told_of_before_it_misses_anything(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(8 * MIB))
    view.fill(0, 2 * MIB)
    bed.register(guard, view)
    guard.read_ahead(4 * MIB)
    guard.start()
    reader = bed.reader(bed.mount(view))
    misses = collect(guard)
    aheads = guard.aheads()
    assert {ahead.inode for ahead in aheads} == {view.inode}
    assert aheads[0].offset < 2 * MIB < aheads[0].offset + aheads[0].length
    assert len(aheads) <= 4
    assert misses[0].offset >= 2 * MIB - CHUNK_BYTES
    assert misses[0].ahead >= MIB
    assert guard.aheads() == []
    guard.read_ahead(0)
    with Server(guard, view):
        view.fill(misses[0].offset, misses[0].length)
        guard.allow(misses[0])
        assert output(reader).split()[0] == sha256(view.data)


def test_a_mapped_hole_waits_and_shows_the_right_bytes(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    guard.start()
    text = "import mmap, sys, hashlib; f = open(sys.argv[1], 'rb'); " + (
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(hashlib.sha256(m).hexdigest())"
    )
    with Server(guard, view) as server:
        assert output(bed.script(text, bed.mount(view))) == sha256(view.data)
    assert server.served and not any(miss.known for miss in server.served)


def test_a_program_in_an_overlay_over_the_layer_runs(bed: Bed) -> None:
    program = Path(shutil.which("echo") or "").read_bytes()
    guard, view = bed.guard(), bed.view("v", program + bytes(-len(program) % 4096))
    bed.register(guard, view)
    guard.start()
    file = bed.mount(view)
    (bed.root / "lower").mkdir()
    merged = bed.layers / "merged"
    merged.mkdir()
    options = f"lowerdir={file.parent}:{bed.root / 'lower'}"
    with Server(guard, view) as server:
        subprocess.run(
            ["mount", "-t", "overlay", "-o", options, "overlay", str(merged)], check=True
        )
        assert output(bed.child("sh", "-c", f"exec {merged / file.name} ready")) == "ready"
    assert server.served


def test_a_denied_read_fails_and_the_next_one_asks_again(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    bed.register(guard, view)
    guard.start()
    reader = bed.script(READ_AT, bed.mount(view), 0, 0)
    assert reader.stdout is not None
    for _ in range(2):  # the kernel asks for readahead, then for the page alone
        guard.deny(collect(guard)[0], errno.ENOSPC)
    assert reader.stdout.readline().split() == [b"errno", b"%d" % errno.EIO]
    with Server(guard, view):
        assert output(reader) == view.data[:16].hex()
    assert guard.counts().denied == 2


def test_an_answer_counts_once(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    guard.start()
    bed.script(READ_AT, bed.mount(view), 0)
    miss = collect(guard)[0]
    view.fill(0, MIB)
    guard.allow(miss)
    with pytest.raises(OSError) as caught:
        guard.deny(miss)
    assert caught.value.errno == errno.ESTALE
    with pytest.raises(ValueError):
        guard.deny(miss, 0)


def test_an_ignore_mark_ends_the_events_of_what_is_mounted_already(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(4 * MIB))
    guard.start()
    file = bed.mount(view)
    with Server(guard, view):
        assert output(bed.script(READ_AT, file, 0)) == view.data[:16].hex()
        view.fill(0, len(view.data))
        guard.ignore(view.path)
        before = guard.counts().events
        assert output(bed.reader(file)).split()[0] == sha256(view.data)
        assert guard.counts().events == before


def test_removing_the_ignore_mark_brings_the_events_back(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    guard.unignore(view.path)  # harmless: there is none
    guard.ignore(view.path)
    guard.unignore(view.path)
    guard.start()
    with Server(guard, view) as server:
        assert output(bed.reader(bed.mount(view))).split()[0] == sha256(view.data)
    assert server.served


def test_unmounting_while_a_read_waits_costs_the_reader_nothing(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    bed.register(guard, view)
    guard.start()
    file = bed.mount(view)
    reader = bed.reader(file)
    miss = collect(guard)[0]
    with pytest.raises(OSError) as caught:
        mounts.unmount(file.parent)
    assert caught.value.errno == errno.EBUSY
    assert mounts.unmount(file.parent, detach=True)
    assert not mounts.is_mounted(file.parent)
    view.fill(miss.offset, miss.length)
    guard.allow(miss)
    with Server(guard, view):
        assert mounts.view_is_open(view.path)
        assert output(reader).split()[0] == sha256(view.data)
    until(lambda: not mounts.view_is_open(view.path), "the detached instance ends")


def test_readers_that_are_killed_while_waiting_end_at_once(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(4 * MIB))
    bed.register(guard, view)
    guard.start()
    file = bed.mount(view)
    readers = [bed.script(READ_AT, file, number * 256 * 1024) for number in range(8)]
    misses = collect(guard, len(readers))
    for reader in readers:
        reader.kill()
        reader.wait(5)
    for miss in misses:
        view.fill(miss.offset, miss.length)
        guard.allow(miss)
    assert guard.counts().outstanding == 0
    with Server(guard, view):
        assert output(bed.reader(file)).split()[0] == sha256(view.data)


WAITERS = """
import os, sys, threading
path, count, stride = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
threading.stack_size(65536)
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
got = [b""] * count
def read(number):
    got[number] = os.pread(fd, 16, number * stride)
threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(b"".join(got).hex())
"""


def test_thousands_of_readers_wait_and_all_get_their_bytes(bed: Bed) -> None:
    count = 3_000
    guard, view = bed.guard(), bed.view("v", bytes(count * CHUNK_BYTES))
    guard.start()
    readers = bed.script(WAITERS, bed.mount(view), count, CHUNK_BYTES)
    misses = collect(guard, count)
    assert guard.counts().outstanding == count
    with open(view.path, "r+b") as file:  # everything else stays zeros
        for number in range(count):
            os.pwrite(file.fileno(), b"%16d" % number, number * CHUNK_BYTES)
    for miss in misses:
        guard.allow(miss)
    assert output(readers) == b"".join(b"%16d" % number for number in range(count)).hex()
    assert guard.counts().read_errors == 0


def test_directio_layers_raise_events_too(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    guard.start()
    with Server(guard, view) as server:
        file = bed.mount(view, directio=True)
        assert output(bed.reader(file)).split()[0] == sha256(view.data)
    assert server.served


def test_a_stopped_guard_makes_readers_wait_and_can_start_again(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    guard.start()
    with pytest.raises(OSError):
        guard.start()
    guard.stop()
    guard.stop()
    reader = bed.reader(bed.mount(view))
    until(lambda: waits_for_bytes(reader.pid), "the reader waits")
    assert guard.misses() == []
    guard.start()
    with Server(guard, view):
        assert output(reader).split()[0] == sha256(view.data)


def test_unregistering_lets_go_of_the_bitmap(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    bed.register(guard, view)
    bed.register(guard, view)
    with pytest.raises(BufferError):
        view.bitmap.extend(b"more")
    guard.unregister(view.inode)
    guard.unregister(view.inode)
    view.bitmap.extend(b"more")
    with pytest.raises(OSError):
        guard.register(view.inode, bytearray(1), chunk_bytes=1, length_bytes=9)


def test_only_a_private_mount_is_ever_marked(bed: Bed) -> None:
    for path in (bed.views, bed.root, Path("/")):
        with pytest.raises(OSError) as caught:
            Guard.open(bed.keeper, path)
        assert caught.value.errno == errno.EINVAL and str(path) in str(caught.value)
    assert bed.keeper.names() == []
