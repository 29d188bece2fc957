"""Images that were removed while in use: they go when they can, and stay when they are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import Digest
from snapshotter.errors import UnavailableError
from snapshotter.imagefs.catalog import PIECE, Catalog, Image
from snapshotter.imagefs.departures import Departures
from snapshotter.imagefs.removal import Outcome
from snapshotter.snapshots.database import Database
from tests.fakes.lazy import digest
from tests.fakes.skipping_clock import SkippingClock


def image(name: str) -> Image:
    return Image(digest(name), (f"r.example/{name}:1",), ("r.example/app",), (), True, "", 1)


class Scene:
    """A remover and a containerd that say what the test wants."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.in_use: set[Digest] = set()
        self.held: set[str] = set()
        self.error: Exception | None = None
        self.tried: asyncio.Queue[Digest] = asyncio.Queue()
        self.gone: asyncio.Queue[Digest] = asyncio.Queue()
        self.asked = asyncio.Event()
        self.departures = Departures(
            catalog, self, self.holds, self.gone.put_nowait, SkippingClock(), images_kept=3
        )

    async def remove(self, image: Image, *, data_only: bool) -> Outcome:
        assert not data_only
        self.tried.put_nowait(image.manifest)
        if self.error is not None:
            raise self.error
        outcome = Outcome(in_use=image.manifest in self.in_use)
        if not outcome.in_use:
            await self.catalog.forget(image.manifest)
        return outcome

    async def holds(self) -> Collection[str]:
        self.asked.set()
        return self.held

    async def leaving(self, *names: str) -> None:
        for name in names:
            await self.catalog.remember(image(name))
            await self.catalog.leave(digest(name))

    async def try_of(self) -> Digest:
        return await asyncio.wait_for(self.tried.get(), 10)

    async def end_of(self) -> Digest:
        return await asyncio.wait_for(self.gone.get(), 10)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    database = await Database.open(tmp_path / "ember.db", (PIECE,))
    made = Scene(Catalog(database))
    yield made
    await made.departures.stop()
    await database.close()


async def test_what_is_free_goes_at_the_start_and_what_is_in_use_when_it_is_released(
    scene: Scene,
) -> None:
    await scene.catalog.remember(image("wanted"))
    await scene.leaving("free", "used")
    scene.in_use.add(digest("used"))
    scene.departures.start()
    assert {await scene.try_of(), await scene.try_of()} == {digest("free"), digest("used")}
    assert await scene.end_of() == digest("free")
    scene.in_use.clear()
    scene.departures.wake()
    assert await scene.end_of() == digest("used")
    assert [each.manifest for each in scene.catalog.images()] == [digest("wanted")]


async def test_an_image_that_containerd_has_again_stays(scene: Scene) -> None:
    await scene.leaving("again")
    scene.held.add("r.example/again:1")
    scene.departures.start()
    await asyncio.wait_for(scene.asked.wait(), 10)
    await scene.leaving("other")
    scene.departures.wake()
    assert await scene.end_of() == digest("other")
    (stayed,) = scene.catalog.images()
    assert (stayed.manifest, stayed.leaving) == (digest("again"), False)


@pytest.mark.parametrize("error", [UnavailableError("not now"), OSError("odd")])
async def test_a_removal_that_fails_is_tried_again(scene: Scene, error: Exception) -> None:
    await scene.leaving("a")
    scene.error = error
    scene.departures.start()
    assert await scene.try_of() == digest("a")
    scene.error = None
    scene.departures.wake()
    assert await scene.end_of() == digest("a")


async def test_of_images_that_containerd_has_not_the_oldest_are_forgotten(scene: Scene) -> None:
    for number, name in enumerate(["old", "held", "used", "young", "new"]):
        await scene.catalog.remember(replace(image(name), seen_ns=number))
    scene.held.add("r.example/held:1")
    scene.in_use.add(digest("used"))
    scene.departures.start()
    assert await scene.end_of() == digest("old")
    assert await scene.try_of() == digest("old")
    assert await scene.try_of() == digest("used")
    scene.departures.wake()
    assert await scene.end_of() == digest("young")
    left = {each.manifest for each in scene.catalog.images()}
    assert left == {digest("held"), digest("used"), digest("new")}
