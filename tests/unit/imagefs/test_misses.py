"""The kernel's questions: each is answered once, with the bytes here or with an error."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from ioengine.guard import Ahead, Guard, Miss, Orphan
from snapshotter.content import CHUNK_BYTES, Digest, Extent
from snapshotter.errors import (
    DeadlineError,
    EmberError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from snapshotter.fetch import Road as RealRoad
from snapshotter.fetch import Tally
from snapshotter.imagefs.misses import SAME_READ_S, MissPump
from snapshotter.imagefs.readahead import AT_ONCE
from snapshotter.imagefs.views import Views as RealViews
from tests.fakes.hand_clock import HandClock
from tests.fakes.lazy import digest

VIEW = digest("view")
OTHER = digest("other view")
LENGTH = 1_000_000


class FakeGuard(Guard):
    """A guard whose kernel is a list; all that the pump asks of one is done here."""

    def __init__(self, *orphans: Orphan) -> None:
        self.orphans = list(orphans)
        self.waiting: list[Miss] = []
        self.answers: list[tuple[int, int]] = []
        self.settled: list[tuple[int, int]] = []
        self.started = False
        self.most_bytes = 0
        self.seen: list[Ahead] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._eventfd

    def start(self) -> None:
        assert all(orphan.reserved for orphan in self.orphans), "new events would get its number"
        self.started = True

    def stop(self) -> None:
        self.started = False

    def ask(self, *misses: Miss) -> None:
        self.waiting += misses
        os.eventfd_write(self._eventfd, 1)

    def misses(self) -> list[Miss]:
        os.eventfd_read(self._eventfd)
        taken, self.waiting = self.waiting, []
        return taken

    def read_ahead(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def aheads(self) -> list[Ahead]:
        taken, self.seen = self.seen, []
        return taken

    def allow(self, miss: Miss) -> None:
        self.answers.append((miss.token, 0))

    def deny(self, miss: Miss, error: int = errno.EIO) -> None:
        self.answers.append((miss.token, error))

    def settle(self, orphan: Orphan, error: int = 0) -> None:
        self.settled.append((orphan.entry, error))
        self.orphans = [other for other in self.orphans if other is not orphan]

    def close(self) -> None:
        os.close(self._eventfd)


class Road(RealRoad):
    """Notes what is wanted; fails if it is told to."""

    def __init__(self) -> None:
        self.wanted: list[tuple[Digest, Extent]] = []
        self.ahead: list[tuple[Digest, Extent]] = []
        self.error: EmberError | None = None
        self.link_bytes = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def ensure(
        self,
        view_id: Digest,
        extent: Extent,
        *,
        demand: bool,
        deadline_s: float | None = None,
        apart: bool = False,
    ) -> None:
        (self.wanted if demand else self.ahead).append((view_id, extent))
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    @property
    def request_bytes(self) -> int:
        return self.link_bytes

    def tally(self, view_id: Digest) -> Tally:
        return Tally()


class Views(RealViews):
    """Two views, inodes 1 and 2."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def by_inode(self, inode: int) -> Digest | None:
        return {1: VIEW, 2: OTHER}.get(inode)

    async def length(self, view: Digest) -> int:
        if self.error is not None:
            raise self.error
        return LENGTH

    async def perhaps_read(self) -> list[Digest]:
        return [VIEW, OTHER]


def miss(
    token: int,
    inode: int = 1,
    offset: int = 4096,
    length: int = 8192,
    ahead: int = 0,
    again: int = 128,
) -> Miss:
    return Miss(token, inode, offset, length, pid=7, known=True, ahead=ahead, again=again)


def pump_of(guard: FakeGuard, road: Road, ahead_bytes: int = 0) -> MissPump:
    return MissPump(guard, road, Views(), HandClock(), 300, ahead_bytes)


async def settle_down() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_miss_is_allowed_once_its_bytes_are_here() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    road.gate.clear()
    guard.ask(miss(1))
    await settle_down()
    assert road.wanted == [(VIEW, Extent(4096, 8192))]
    assert guard.answers == []
    road.gate.set()
    await settle_down()
    assert guard.answers == [(1, 0)]
    await pump.stop()
    guard.close()


@pytest.mark.parametrize(
    ("error", "number"),
    [(DeadlineError("no source"), errno.EIO), (NoSpaceError("full"), errno.ENOSPC)],
)
async def test_a_miss_that_cannot_be_filled_is_denied_and_asked_again_later(
    error: EmberError, number: int
) -> None:
    guard, road, clock = FakeGuard(), Road(), HandClock()
    road.error = error
    pump = MissPump(guard, road, Views(), clock, 300)
    pump.start()
    await settle_down()
    guard.ask(miss(1))
    await settle_down()
    road.error = None
    guard.ask(miss(2))
    await settle_down()
    assert guard.answers == [(1, number), (2, 0)]
    assert (pump.counts.asked, pump.counts.filled, pump.counts.failed) == (2, 1, 1)
    await pump.stop()
    guard.close()


async def test_parts_of_a_read_that_waited_in_vain_fail_with_it_for_a_moment() -> None:
    guard, road, clock = FakeGuard(), Road(), HandClock()
    road.error = DeadlineError("no source")
    pump = MissPump(guard, road, Views(), clock, 300)
    pump.start()
    await settle_down()
    road.gate.clear()
    guard.ask(miss(1, offset=0, length=131_072))
    await settle_down()
    await clock.advance(300)
    road.gate.set()
    await settle_down()
    guard.ask(miss(2, offset=0, length=4096), miss(3, offset=65_536, length=4096))
    guard.ask(miss(4, offset=500_000, length=4096))
    await settle_down()
    assert sorted(guard.answers) == [(n, errno.EIO) for n in (1, 2, 3, 4)]
    assert [extent.offset for _, extent in road.wanted] == [0, 500_000]
    road.error = None
    await clock.advance(SAME_READ_S + 0.1)
    guard.ask(miss(5, offset=0, length=4096))
    await settle_down()
    assert guard.answers[4:] == [(5, 0)]
    await pump.stop()
    guard.close()


async def test_a_read_past_the_end_is_cut_and_one_behind_it_needs_nothing() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    guard.ask(miss(1, offset=LENGTH - 10, length=4096), miss(2, offset=LENGTH + 512))
    await settle_down()
    assert road.wanted == [(VIEW, Extent(LENGTH - 10, 10))]
    assert sorted(guard.answers) == [(1, 0), (2, 0)]
    await pump.stop()
    guard.close()


async def test_an_unknown_file_is_denied_and_never_shown_as_zeros() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    guard.ask(miss(1, inode=99), miss(2, inode=0))
    await settle_down()
    assert sorted(guard.answers) == [(1, errno.EIO), (2, errno.EIO)]
    await pump.stop()
    guard.close()


async def test_orphans_whose_numbers_are_not_kept_are_settled_before_the_group_is_read() -> None:
    orphans = [Orphan(1, 1, 0, 4096, 7), Orphan(2, None, 8192, 4096, 8)]
    guard, road = FakeGuard(*orphans), Road()
    pump = pump_of(guard, road)
    road.gate.clear()
    pump.start()
    await settle_down()
    assert not guard.started
    road.gate.set()
    await settle_down()
    assert guard.started
    assert sorted(guard.settled) == [(1, 0), (2, 0)]
    await pump.stop()
    guard.close()


async def test_new_reads_do_not_wait_for_orphans_whose_numbers_are_kept() -> None:
    guard, road = FakeGuard(Orphan(1, 1, 0, 4096, 7, reserved=True)), Road()
    pump = pump_of(guard, road)
    road.gate.clear()
    pump.start()
    await settle_down()
    assert guard.started
    assert guard.settled == []
    guard.ask(miss(1, offset=LENGTH + 512))
    await settle_down()
    assert guard.answers == [(1, 0)]
    road.gate.set()
    await settle_down()
    assert guard.settled == [(1, 0)]
    await pump.stop()
    guard.close()


async def test_an_orphan_of_a_file_that_nobody_knows_is_denied_and_never_shown_as_zeros() -> None:
    guard, road = FakeGuard(Orphan(1, 99, 0, 4096, 7, reserved=True)), Road()
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    assert guard.settled == [(1, errno.EIO)]
    assert road.wanted == []
    await pump.stop()
    guard.close()


async def test_an_orphan_of_an_unknown_view_has_its_range_filled_in_every_incomplete_one() -> None:
    guard, road = FakeGuard(Orphan(1, None, 8192, None, 8)), Road()
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    rest = Extent(8192, LENGTH - 8192)
    assert sorted(road.wanted) == sorted([(VIEW, rest), (OTHER, rest)])
    await pump.stop()
    guard.close()


async def test_an_orphan_that_cannot_be_filled_is_failed_and_not_released_with_zeros() -> None:
    guard, road = FakeGuard(Orphan(1, 1, 0, 4096, 8)), Road()
    road.error = DeadlineError("no source")
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    assert guard.settled == [(1, errno.EIO)]
    guard.close()


async def test_stopping_leaves_what_is_unanswered_to_a_successor() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road)
    pump.start()
    await settle_down()
    road.gate.clear()
    guard.ask(miss(1))
    await settle_down()
    await pump.stop()
    assert guard.answers == []
    assert not guard.started
    guard.close()


async def test_what_follows_a_miss_is_read_ahead_once_the_reader_goes_on() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road, ahead_bytes=100_000)
    pump.start()
    await settle_down()
    guard.ask(miss(1, offset=0, length=4096), miss(2, offset=LENGTH - 4096, length=4096))
    await settle_down()
    assert sorted(guard.answers) == [(1, 0), (2, 0)]
    assert road.ahead == [(VIEW, Extent(4096, 100_000))]
    await pump.stop()
    guard.close()


async def test_behind_readers_that_do_not_read_on_less_and_less_is_read() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road, ahead_bytes=8 * CHUNK_BYTES)
    pump.start()
    await settle_down()
    for again in (255, 128, 64, 16, 8, 4, 0):
        guard.ask(miss(1, offset=0, length=4096, again=again))
        await settle_down()
    lengths = [extent.length for _, extent in road.ahead]
    assert lengths[:2] == [8 * CHUNK_BYTES, 8 * CHUNK_BYTES]
    assert lengths == sorted(lengths, reverse=True)
    assert len(lengths) == 5
    await pump.stop()
    guard.close()


async def test_what_a_reader_in_order_comes_to_is_asked_for_while_it_waits() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road, ahead_bytes=100_000)
    pump.start()
    await settle_down()
    assert guard.most_bytes == 800_000
    road.link_bytes = 1_000_000
    guard.seen = [Ahead(1, 900_000, 100)]
    guard.ask()
    await settle_down()
    assert guard.most_bytes == 12_000_000
    road.ahead.clear()
    road.gate.clear()
    guard.ask(miss(1, offset=0, length=4096, ahead=300_000))
    await settle_down()
    assert road.wanted == [(VIEW, Extent(0, 4096))]
    assert road.ahead == [(VIEW, Extent(4096, 300_000))]
    road.gate.set()
    await settle_down()
    assert guard.answers == [(1, 0)]
    assert len(road.ahead) == 1
    await pump.stop()
    guard.close()


async def test_what_the_guard_sees_coming_is_fetched_before_anybody_waits() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road, ahead_bytes=100_000)
    pump.start()
    await settle_down()
    guard.seen = [Ahead(1, 65_536, 200_000), Ahead(99, 0, 4096)]
    guard.ask()
    await settle_down()
    assert road.ahead == [(VIEW, Extent(65_536, 200_000))]
    assert road.wanted == []
    assert guard.answers == []
    await pump.stop()
    guard.close()


async def test_reading_ahead_is_bounded_and_ends_with_the_pump() -> None:
    guard, road = FakeGuard(), Road()
    pump = pump_of(guard, road, ahead_bytes=100_000)
    pump.start()
    await settle_down()
    road.gate.clear()
    guard.seen = [Ahead(1, n * 1000, 1000) for n in range(500)]
    guard.ask()
    await settle_down()
    assert len(road.ahead) == AT_ONCE
    await pump.stop()
    guard.close()


async def test_nothing_is_read_ahead_of_a_miss_that_failed() -> None:
    guard, road = FakeGuard(), Road()
    road.error = DeadlineError("no source")
    pump = pump_of(guard, road, ahead_bytes=100_000)
    pump.start()
    await settle_down()
    guard.ask(miss(1))
    await settle_down()
    assert road.ahead == []
    await pump.stop()
    guard.close()


async def test_work_that_is_stopped_under_a_reader_is_taken_up_again() -> None:
    guard, road, clock = FakeGuard(), Road(), HandClock()
    road.error = UnavailableError("fetching was stopped")
    pump = MissPump(guard, road, Views(), clock, 300)
    pump.start()
    await settle_down()
    guard.ask(miss(1))
    await settle_down()
    assert guard.answers == []
    road.error = None
    await clock.advance(1)
    await settle_down()
    assert guard.answers == [(1, 0)]
    await pump.stop()
    guard.close()


@pytest.mark.parametrize(
    "error", [NotFoundError("no index"), OSError(errno.EIO, "disk"), ValueError("surprise")]
)
async def test_a_view_that_cannot_be_opened_fails_its_readers_and_keeps_nobody_waiting(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    guard, road = FakeGuard(Orphan(5, 1, 0, 4096, 8)), Road()
    pump = MissPump(guard, road, Views(error=error), HandClock(), 300)
    pump.start()
    await settle_down()
    assert guard.settled == [(5, errno.EIO)]
    assert guard.started
    guard.ask(miss(1))
    await settle_down()
    assert guard.answers == [(1, errno.EIO)]
    assert f"a reader of view {VIEW} gets an error for bytes 4096 to 12288:" in caplog.text
    assert str(error) in caplog.text
    await pump.stop()
    guard.close()
