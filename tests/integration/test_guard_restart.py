"""The guard's holder dies, and nobody who reads through it notices more than the time it took."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ioengine._native import lib
from ioengine.guard import GROUP_NAME, JOURNAL_NAME, Guard
from ioengine.keeper import Keeper
from tests.integration.guard_bed import (
    CHUNK_BYTES,
    Bed,
    Holder,
    Server,
    collect,
    content,
    output,
    settle_all,
    sha256,
    until,
)
from tests.integration.test_guard import READ_AT

pytestmark = pytest.mark.root
MIB = 1 << 20


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    try:
        yield bed
    finally:
        bed.close()


def test_a_reader_survives_kill_9_of_the_daemon_in_mid_read(bed: Bed) -> None:
    holder, view = Holder(bed), bed.view("v", content(MIB))
    reader = bed.reader(bed.mount(view))
    assert holder.line().split()[:2] == ["miss", str(view.inode)]
    holder.kill()
    assert reader.poll() is None
    guard = bed.guard()
    assert guard.adopted
    assert [orphan.inode for orphan in guard.orphans] == [view.inode]
    settle_all(guard, view)
    assert guard.orphans == []
    guard.start()
    with Server(guard, view):
        assert output(reader).split()[0] == sha256(view.data)


def test_reads_begun_while_no_daemon_lives_wait_for_the_next_one(bed: Bed) -> None:
    holder, view = Holder(bed), bed.view("v", content(MIB))
    file = bed.mount(view)
    holder.kill()
    reader = bed.reader(file)
    guard = bed.guard()
    assert guard.adopted and guard.orphans == []
    guard.start()
    with Server(guard, view):
        assert output(reader).split()[0] == sha256(view.data)


def test_orphans_outlive_several_daemons(bed: Bed) -> None:
    view = bed.view("v", content(MIB))
    holder = Holder(bed)
    file = bed.mount(view)
    readers = [bed.script(READ_AT, file, number * 4 * CHUNK_BYTES) for number in range(4)]
    for _ in readers:
        holder.line()
    holder.kill()
    for _ in range(3):
        with Guard.open(bed.keeper, bed.guarded) as guard:
            assert len(guard.orphans) == 4 and guard.counts().orphans == 4
    guard = bed.guard()
    settle_all(guard, view)
    guard.start()
    with Server(guard, view):
        for number, reader in enumerate(readers):
            at = number * 4 * CHUNK_BYTES
            assert output(reader) == view.data[at : at + 16].hex()


def test_a_group_is_not_read_while_a_new_event_could_get_an_orphans_number(bed: Bed) -> None:
    holder, view = Holder(bed), bed.view("v", content(MIB))
    reader = bed.script(READ_AT, bed.mount(view), 4 * CHUNK_BYTES)
    holder.line()
    taken = [os.dup(bed.keeper.fileno()) for _ in range(300)]  # more than the holder had
    holder.kill()
    guard = bed.guard()
    assert [orphan.reserved for orphan in guard.orphans] == [False]
    for descriptor in taken:
        os.close(descriptor)
    with pytest.raises(OSError) as caught:
        guard.start()
    assert caught.value.errno == errno.EBUSY
    settle_all(guard, view)
    guard.start()
    assert output(reader) == view.data[4 * CHUNK_BYTES :][:16].hex()


def test_new_reads_are_served_while_orphans_wait_and_each_gets_its_own_answer(bed: Bed) -> None:
    holder, view = Holder(bed), bed.view("v", content(4 * MIB))
    file = bed.mount(view)
    places = [number * 4 * CHUNK_BYTES for number in range(12)]
    old = [bed.script(READ_AT, file, at) for at in places[:6]]
    for _ in old:
        holder.line()
    holder.kill()
    before = open_descriptors()
    guard = bed.guard()
    bed.register(guard, view)
    assert [orphan.reserved for orphan in guard.orphans] == [True] * 6
    guard.start()
    new = [bed.script(READ_AT, file, at) for at in places[6:]]
    with Server(guard, view):
        for at, reader in zip(places[6:], new, strict=True):
            assert output(reader) == view.data[at : at + 16].hex()
    assert [reader.poll() for reader in old] == [None] * 6
    assert guard.counts().orphans == 6 and guard.counts().outstanding == 0
    settle_all(guard, view)
    for at, reader in zip(places[:6], old, strict=True):
        assert output(reader) == view.data[at : at + 16].hex()
    guard.close()
    assert open_descriptors() == before - len(old)  # their pipes


def test_an_orphan_can_be_failed_and_the_next_read_asks_again(bed: Bed) -> None:
    holder, view = Holder(bed), bed.view("v", content(MIB))
    reader = bed.script(READ_AT, bed.mount(view), 0, 0)
    holder.line()
    holder.kill()
    guard = bed.guard()
    orphan = guard.orphans[0]
    guard.settle(orphan, errno.EIO)
    with pytest.raises(OSError) as caught:
        guard.settle(orphan)
    assert caught.value.errno == errno.ESTALE
    guard.start()
    guard.deny(collect(guard)[0])
    with Server(guard, view):
        assert output(reader).split() == ["errno", str(errno.EIO), view.data[:16].hex()]


def test_what_a_closed_guard_left_unanswered_is_its_successors_orphan(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    guard.start()
    reader = bed.reader(bed.mount(view))
    miss = collect(guard)[0]
    descriptors = open_descriptors()
    guard.close()
    guard.close()
    assert open_descriptors() < descriptors - 4  # the event's own among them
    with pytest.raises(OSError) as caught:
        guard.allow(miss)
    assert caught.value.errno == errno.EBADF
    successor = bed.guard()
    assert [(o.inode, o.offset) for o in successor.orphans] == [(view.inode, miss.offset)]
    settle_all(successor, view)
    successor.start()
    with Server(successor, view):
        assert output(reader).split()[0] == sha256(view.data)


def test_a_second_daemon_is_kept_out_while_the_first_lives(bed: Bed) -> None:
    holder = Holder(bed)
    with pytest.raises(OSError) as caught:
        Guard.open(bed.keeper, bed.guarded, predecessor_s=0.1)
    assert caught.value.errno == errno.EBUSY and "another daemon" in str(caught.value)
    holder.kill()
    assert bed.guard().adopted


def test_the_guard_is_handed_to_a_new_keeper_when_the_old_one_dies(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))

    async def survive() -> Keeper:
        died = asyncio.Event()
        bed.keeper.watch(died.set)
        os.kill(bed.keeper.ping().pid, 9)
        await asyncio.wait_for(died.wait(), 10)
        return Keeper.connect_or_start(bed.socket, cgroup=None)

    keeper = asyncio.run(survive())
    assert not bed.keeper.alive() and keeper.names() == []
    guard.entrust(keeper)
    bed.keeper.close()
    bed.keeper = keeper
    guard.start()
    reader = bed.reader(bed.mount(view))
    collect(guard)
    guard.close()
    successor = bed.guard()
    assert successor.adopted
    settle_all(successor, view)
    successor.start()
    with Server(successor, view):
        assert output(reader).split()[0] == sha256(view.data)


def test_a_lost_group_is_not_passed_off_as_adopted(bed: Bed) -> None:
    holder = Holder(bed)
    os.kill(bed.keeper.ping().pid, 9)
    holder.kill()
    bed.keeper.close()
    bed.keeper = Keeper.connect_or_start(bed.socket, cgroup=None)
    guard, view = bed.guard(), bed.view("v", content(MIB))
    assert not guard.adopted and guard.orphans == []
    guard.start()
    with Server(guard, view) as server:
        assert output(bed.reader(bed.mount(view))).split()[0] == sha256(view.data)
    assert server.served


def test_group_and_journal_come_back_from_a_service_managers_store(bed: Bed) -> None:
    guard, view = bed.guard(), bed.view("v", content(MIB))
    stored = {name: os.dup(fd) for name, fd in guard.descriptors().items()}
    guard.start()
    reader = bed.reader(bed.mount(view))
    collect(guard)
    guard.close()
    bed.keeper.drop(GROUP_NAME, JOURNAL_NAME)
    successor = Guard.open(bed.keeper, bed.guarded, stored=stored)
    bed.guards.append(successor)
    for descriptor in stored.values():
        os.close(descriptor)
    assert successor.adopted and len(successor.orphans) == 1
    assert sorted(bed.keeper.names()) == sorted([GROUP_NAME, JOURNAL_NAME])
    settle_all(successor, view)
    successor.start()
    with Server(successor, view):
        assert output(reader).split()[0] == sha256(view.data)


def test_a_journal_of_another_kind_is_refused(bed: Bed, tmp_path: Path) -> None:
    strange = tmp_path / "journal"
    strange.write_bytes(b"EMBRJRNL" + bytes(5000))
    with open(strange, "r+b") as file:
        group = lib.ember_guard_group()
        bed.keeper.put({GROUP_NAME: group, JOURNAL_NAME: file.fileno()})
        os.close(group)
    with pytest.raises(OSError) as caught:
        Guard.open(bed.keeper, bed.guarded)
    assert caught.value.errno == errno.EPROTO


def test_a_half_made_pair_is_made_anew(bed: Bed) -> None:
    group = lib.ember_guard_group()
    bed.keeper.put({GROUP_NAME: group})
    os.close(group)
    guard = bed.guard()
    assert not guard.adopted
    assert sorted(bed.keeper.names()) == sorted([GROUP_NAME, JOURNAL_NAME])


def test_opening_fails_cleanly_when_the_keeper_is_gone(bed: Bed) -> None:
    os.kill(bed.keeper.ping().pid, 9)
    until(lambda: not bed.keeper.alive(), "the keeper is gone")
    before = open_descriptors()
    with pytest.raises(OSError):
        Guard.open(bed.keeper, bed.guarded)
    assert open_descriptors() == before
