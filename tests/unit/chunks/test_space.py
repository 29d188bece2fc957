"""The ballast is there when it is needed, gives way in steps, and comes back when it can."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.chunks.space import MIB, Space, SpaceLimits
from snapshotter.errors import NoSpaceError

LIMITS = SpaceLimits(ballast_bytes=4 * MIB, keep_free_bytes=0, release_bytes=MIB)


def test_the_ballast_is_allocated_released_in_steps_and_refilled(tmp_path: Path) -> None:
    space = Space(tmp_path, LIMITS)
    ballast = tmp_path / "ballast"
    assert space.refill_ballast() == 4 * MIB
    assert ballast.stat().st_blocks * 512 >= 4 * MIB
    assert space.release_ballast(100) == MIB
    assert ballast.stat().st_size == 3 * MIB
    assert space.release_ballast(10 * MIB) == 3 * MIB
    assert space.release_ballast(100) == 0
    assert space.refill_ballast() == 4 * MIB
    assert space.refill_ballast() == 4 * MIB


def test_the_ballast_does_not_come_back_at_the_cost_of_others(tmp_path: Path) -> None:
    space = Space(tmp_path, replace(LIMITS, keep_free_bytes=1 << 60))
    assert space.refill_ballast() == 0
    assert not (tmp_path / "ballast").exists()


def test_background_work_leaves_the_last_bytes_to_others(tmp_path: Path) -> None:
    space = Space(tmp_path, replace(LIMITS, keep_free_bytes=1 << 60))
    with (tmp_path / "file").open("w+b") as file:
        with pytest.raises(NoSpaceError, match=f"no space for chunks under {tmp_path}"):
            space.reserve(file.fileno(), 0, 4096, demand=False)
        space.reserve(file.fileno(), 0, 4096, demand=True)
        assert (tmp_path / "file").stat().st_blocks * 512 == 4096


async def test_eviction_comes_before_the_ballast_and_once_for_all(tmp_path: Path) -> None:
    asked: list[int] = []
    gate = asyncio.Event()

    async def evict(length: int) -> int:
        asked.append(length)
        await gate.wait()
        return 5000 if len(asked) == 1 else 0

    space = Space(tmp_path, LIMITS, evict)
    space.refill_ballast()
    waiting = [asyncio.create_task(space.make_room(4096, demand=True)) for _ in range(5)]
    for _ in range(5):
        await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*waiting) == [True] * 5
    assert asked == [4096]
    assert (tmp_path / "ballast").stat().st_size == 4 * MIB
    assert not await space.make_room(4096, demand=False)
    assert await space.make_room(4096, demand=True)
    assert (tmp_path / "ballast").stat().st_size == 3 * MIB


async def test_the_ballast_gives_way_one_step_for_all_who_need_it_at_once(tmp_path: Path) -> None:
    space = Space(tmp_path, LIMITS)
    space.refill_ballast()
    made = await asyncio.gather(*(space.make_room(4096, demand=True) for _ in range(20)))
    assert made == [True] * 20
    assert (tmp_path / "ballast").stat().st_size == 3 * MIB


async def test_an_eviction_that_fails_or_hangs_is_gone_without(tmp_path: Path) -> None:
    async def broken(length: int) -> int:
        raise ValueError("no")

    async def hanging(length: int) -> int:
        await asyncio.Event().wait()
        return 1

    limits = replace(LIMITS, evict_timeout_s=0.01)
    assert not await Space(tmp_path, limits, broken).make_room(1, demand=True)
    assert not await Space(tmp_path, limits, hanging).make_room(1, demand=True)
