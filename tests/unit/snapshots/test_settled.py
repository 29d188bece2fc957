"""Mounts that are answered from memory are those that the database says, whatever went before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from pathlib import Path

import pytest

from snapshotter.errors import EmberError, NotFoundError
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.settled import MOST, Settled
from snapshotter.snapshots.snapshotter import Snapshotter
from tests.fakes.lazy import FakeLazyLayers
from tests.unit.snapshots.conftest import CONFIG
from tests.unit.snapshots.test_lazy import BOTTOM, take

KEYS = ("a", "b", "c")


async def told(asked: Awaitable[object]) -> object:
    """What was answered, or the kind of error."""
    try:
        return await asked
    except EmberError as error:
        return type(error)


def fresh(database: Database, root: Path, lazy: FakeLazyLayers) -> Snapshotter:
    """One that remembers nothing."""
    return Snapshotter(database, root, lazy, CONFIG)


async def one_step(snapshotter: Snapshotter, chance: random.Random, serial: int) -> object:
    key = chance.choice(KEYS)
    verb = chance.choice(("prepare", "view", "mounts", "mounts", "commit", "remove"))
    if verb == "prepare":
        return await told(snapshotter.prepare(key, chance.choice(("", "base")), {}))
    if verb == "view":
        return await told(snapshotter.view(key, "base", {}))
    if verb == "commit":
        return await told(snapshotter.commit(f"committed-{serial}", key, {}))
    return await told(getattr(snapshotter, verb)(key))


@pytest.mark.parametrize("seed", range(6))
async def test_after_any_calls_at_once_memory_says_what_the_database_says(
    snapshotter: Snapshotter, database: Database, lazy: FakeLazyLayers, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    await snapshotter.prepare("first", "", {})
    await snapshotter.commit("base", "first", {})
    for turn in range(40):
        steps = [one_step(snapshotter, chance, 8 * turn + n) for n in range(chance.randrange(1, 8))]
        await asyncio.gather(*steps)
        for key in KEYS:
            truth = await told(fresh(database, tmp_path, lazy).mounts(key))
            assert await told(snapshotter.mounts(key)) == truth, (turn, key)


async def test_a_key_that_is_used_again_has_the_mounts_of_its_new_snapshot(
    snapshotter: Snapshotter,
) -> None:
    before = await snapshotter.prepare("key", "", {})
    assert await snapshotter.mounts("key") == before
    await snapshotter.remove("key")
    with pytest.raises(NotFoundError):
        await snapshotter.mounts("key")
    after = await snapshotter.prepare("key", "", {})
    assert after != before
    assert await snapshotter.mounts("key") == after


async def test_what_stands_on_a_lazy_layer_is_looked_at_each_time(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    await snapshotter.prepare("key", BOTTOM, {})
    asked = len(lazy.waits_s)
    for _ in range(3):
        await snapshotter.mounts("key")
    assert len(lazy.waits_s) == asked + 3


def test_what_was_found_before_a_change_is_not_kept_and_all_is_bounded() -> None:
    settled = Settled()
    drops = settled.drops
    settled.drop("key")
    settled.keep("key", (), drops)
    assert settled.get("key") is None
    for number in range(2 * MOST + 1):
        settled.keep(str(number), (), settled.drops)
    assert settled.get(str(2 * MOST)) == ()
    assert sum(settled.get(str(number)) is not None for number in range(2 * MOST + 1)) <= MOST
