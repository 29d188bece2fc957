"""One holder of a key at a time, in order, and no lock left that nobody wants."""

from __future__ import annotations

import asyncio

import pytest

from snapshotter.keyed_locks import KeyedLocks


async def test_one_key_is_held_by_one_at_a_time_in_order() -> None:
    locks, seen = KeyedLocks[str](), list[str]()

    async def work(key: str, name: str) -> None:
        async with locks.hold(key):
            seen.append(f"{name} in")
            await asyncio.sleep(0)
            seen.append(f"{name} out")

    await asyncio.gather(work("a", "1"), work("a", "2"), work("a", "3"))
    assert seen == ["1 in", "1 out", "2 in", "2 out", "3 in", "3 out"]
    assert len(locks) == 0


async def test_keys_do_not_wait_for_each_other() -> None:
    locks = KeyedLocks[int]()
    async with locks.hold(1), locks.hold(2):
        assert len(locks) == 2
    assert len(locks) == 0


async def test_who_fails_or_is_cancelled_leaves_the_key_to_the_next() -> None:
    locks = KeyedLocks[str]()
    with pytest.raises(ValueError):
        async with locks.hold("a"):
            waiting = asyncio.create_task(hold(locks))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            raise ValueError
    assert len(locks) == 0
    async with asyncio.timeout(5):
        await hold(locks)


async def hold(locks: KeyedLocks[str]) -> None:
    async with locks.hold("a"):
        pass
