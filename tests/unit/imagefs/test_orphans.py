"""Reads that a dead daemon left without a word of whose file it was: bytes or an error, soon."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from ioengine.buffers import BufferPool
from ioengine.guard import Orphan
from ioengine.threads import ThreadEngine
from snapshotter.chunks.space import SpaceLimits
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.content import Digest, Extent
from snapshotter.errors import NotFoundError
from snapshotter.fetch import LayerSource
from snapshotter.fetch import Road as RealRoad
from snapshotter.imagefs.misses import MissPump
from snapshotter.imagefs.views import Views as RealViews
from tests.fakes.hand_clock import HandClock
from tests.fakes.lazy import digest
from tests.unit.chunks.conftest import BOOT, CHUNK, Content
from tests.unit.imagefs.test_misses import OTHER, VIEW, FakeGuard, Road, Views, settle_down


class HalfKnown(Views):
    """OTHER is mounted, but its index is gone."""

    async def length(self, view: Digest) -> int:
        if view == OTHER:
            raise NotFoundError("no index is here")
        return await super().length(view)


class StubbornGuard(FakeGuard):
    """The kernel takes no answer for entry 1."""

    def settle(self, orphan: Orphan, error: int = 0) -> None:
        if orphan.entry == 1:
            raise OSError(errno.ENOENT, "no such event")
        super().settle(orphan, error)


def pump_of(guard: FakeGuard, road: Road, views: Views) -> MissPump:
    return MissPump(guard, road, views, HandClock(), 300)


async def test_all_views_that_it_may_lie_in_are_filled_at_once() -> None:
    guard, road = FakeGuard(Orphan(1, None, 0, CHUNK, 7)), Road()
    road.gate.clear()
    pump = pump_of(guard, road, Views())
    pump.start()
    await settle_down()
    assert sorted(road.wanted) == sorted((view, Extent(0, CHUNK)) for view in (VIEW, OTHER))
    road.gate.set()
    await settle_down()
    assert guard.settled == [(1, 0)]
    await pump.stop()
    guard.close()


async def test_it_is_denied_where_it_may_lie_in_a_view_without_an_index() -> None:
    guard, road = FakeGuard(Orphan(1, None, 0, CHUNK, 7)), Road()
    pump = pump_of(guard, road, HalfKnown())
    pump.start()
    await settle_down()
    assert guard.settled == [(1, errno.EIO)]
    assert guard.started
    await pump.stop()
    guard.close()


@pytest.mark.parametrize("inode", [1, None])
async def test_one_that_breaks_everything_keeps_nobody_else_waiting(inode: int | None) -> None:
    broken = Orphan(1, inode, 0, CHUNK, 7, reserved=True)
    guard, road = StubbornGuard(broken, Orphan(2, 2, 0, CHUNK, 8, reserved=True)), Road()
    views = Views(error=ZeroDivisionError("odd") if inode is None else None)
    pump = pump_of(guard, road, views)
    pump.start()
    await settle_down()
    assert guard.started
    assert guard.settled == [(2, errno.EIO if inode is None else 0)]
    await pump.stop()
    guard.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ViewStore]:
    engine = ThreadEngine.open(BufferPool(4, 64 * 1024), workers=2)
    space = SpaceLimits(ballast_bytes=0, keep_free_bytes=0)
    config = StoreConfig(tmp_path, chunk_bytes=CHUNK, space=space)
    made = ViewStore(config, engine, in_use=lambda path: False, boot=BOOT)
    await made.start()
    yield made
    await made.close()
    await engine.close()


async def test_it_may_lie_in_every_incomplete_view_that_anybody_has_open(
    store: ViewStore, tmp_path: Path
) -> None:
    content = Content(3 * CHUNK)
    folder = tmp_path / "views"
    held = []
    for name, chunks, is_open in (
        ("lacking and read", 1, True),
        ("lacking and idle", 1, False),
        ("whole and read", 3, True),
    ):
        view = await store.open(digest(name), 3 * CHUNK, content.digest)
        for number in range(chunks):
            view.put(number, content.chunk(number))
        await store.release(view.digest)
        if is_open:
            held.append(os.open(view.path, os.O_RDONLY))
    (folder / "somebody-s.txt").write_bytes(b"")
    road = RealRoad(store, NoSources(), [])
    views = RealViews(store, road, None, folder, folder, lambda view: None)
    try:
        assert await views.perhaps_read() == [digest("lacking and read")]
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert await views.perhaps_read() == []
    await road.close()


class NoSources:
    """Nothing is known."""

    def of_view(self, view: Digest) -> Sequence[LayerSource]:
        return []

    def look_further(self, view: Digest) -> None:
        raise AssertionError("nobody asks")
