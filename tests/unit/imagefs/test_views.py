"""Views come and go while their files are read: the guard always has the bitmap that is live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine
from snapshotter.chunks.space import SpaceLimits
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.content import Digest
from snapshotter.imagefs.views import Views
from tests.unit.chunks.conftest import CHUNK, VIEW, Content


class Guard:
    """Knows bitmaps by inode."""

    def __init__(self) -> None:
        self.known: dict[int, memoryview] = {}
        self.ignored: list[Path] = []

    def register(self, inode: int, bitmap: memoryview, **_: int) -> None:
        self.known[inode] = bitmap

    def unregister(self, inode: int) -> None:
        self.known.pop(inode, None)

    def unignore(self, path: Path) -> None:
        if path in self.ignored:
            self.ignored.remove(path)

    def ignore(self, path: Path) -> None:
        self.ignored.append(path)


class Road:
    """Stopping takes as long as the test wants."""

    def __init__(self) -> None:
        self.stopping, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def stop(self, view: Digest) -> None:
        self.stopping.set()
        await self.go.wait()

    def is_working(self, view: Digest) -> bool:
        return False


class Scene:
    def __init__(self, root: Path, store: ViewStore) -> None:
        self.content = Content(4 * CHUNK)
        self.store, self.guard, self.road = store, Guard(), Road()
        self.index: Any = SimpleNamespace(
            diff_id=VIEW, view_bytes=len(self.content.data), chunk_digest=self.content.digest
        )
        road: Any = self.road
        guard: Any = self.guard
        self.views = Views(
            store, road, guard, root / "views", root / "marked", lambda view: self.index
        )

    async def complete(self) -> None:
        view = await self.views.open(self.index)
        for number in range(4):
            await view.write(number, self.content.chunk(number), demand=True)
        await view.flush()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    engine = ThreadEngine.open(BufferPool(4), workers=2)
    config = StoreConfig(tmp_path, chunk_bytes=CHUNK, space=SpaceLimits(0, 0))
    store = ViewStore(config, engine, in_use=lambda path: False)
    await store.start()
    made = Scene(tmp_path, store)
    yield made
    await made.views.close()
    await store.close()
    await engine.close()


async def test_a_read_that_comes_while_a_view_is_let_go_of_has_it_guarded_again(
    scene: Scene,
) -> None:
    await scene.views.guard(scene.index)
    (inode,) = scene.guard.known
    scene.road.go.clear()
    scene.road.stopping.clear()
    letting_go = asyncio.create_task(scene.views.let_go(VIEW))
    await scene.road.stopping.wait()
    asking = asyncio.create_task(scene.views.by_inode(inode))
    await asyncio.sleep(0)
    scene.road.go.set()
    await letting_go
    assert await asking == VIEW
    view = scene.store.get(VIEW)
    assert view is not None
    assert scene.guard.known[inode] == view.readable_bitmap
    await scene.complete()
    assert scene.guard.ignored == [view.path]
    assert list(scene.views.incomplete()) == []


async def test_dropping_leaves_no_bitmap_with_the_guard_and_the_next_pull_a_new_one(
    scene: Scene,
) -> None:
    await scene.views.guard(scene.index)
    await scene.views.drop(VIEW)
    assert scene.guard.known == {}
    await scene.views.guard(scene.index)
    view = scene.store.get(VIEW)
    assert view is not None
    await view.write(2, scene.content.chunk(2), demand=True)
    assert bytes(scene.guard.known[view.inode]) == bytes([4])


@pytest.mark.parametrize("mounted", [False, True])
async def test_what_was_streamed_stays_open_only_if_it_is_mounted(
    scene: Scene, mounted: bool
) -> None:
    if mounted:
        await scene.views.guard(scene.index)
    staged = await scene.views.stage(VIEW, 0)
    await asyncio.to_thread(staged.sink, 0, memoryview(scene.content.data))
    await staged.seal(scene.index)
    assert (scene.store.get(VIEW) is not None) == mounted
    assert scene.views.is_busy(VIEW) == mounted
    assert await scene.views.whole(VIEW)


async def test_what_only_an_ended_container_read_is_let_go_of(scene: Scene) -> None:
    await scene.views.guard(scene.index)
    await scene.views.let_go_of_all_but({VIEW})
    assert scene.views.is_busy(VIEW)
    (inode,) = scene.guard.known
    await scene.views.let_go_of_all_but(set())
    assert not scene.views.is_busy(VIEW)
    assert scene.store.get(VIEW) is None
    assert await scene.views.by_inode(inode) == VIEW  # it runs after all
    assert scene.views.is_busy(VIEW)
