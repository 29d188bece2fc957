"""Waits end at their time and no earlier, whatever else begins and ends meanwhile."""

from __future__ import annotations

import random

from snapshotter.fetch.deadlines import Deadlines
from tests.fakes.hand_clock import HandClock


async def test_each_wait_ends_at_its_time() -> None:
    clock, ended = HandClock(), list[tuple[float, float]]()
    deadlines = Deadlines(clock)
    chance = random.Random(2)
    for _ in range(200):
        after_s = chance.uniform(0, 50)
        at_s = clock.now_s + after_s

        def expire(at_s: float = at_s) -> None:
            ended.append((at_s, clock.now_s))

        deadline = deadlines.add(after_s, expire)
        if chance.random() < 0.5:
            deadline.cancel()
            deadline.cancel()
        if chance.random() < 0.3:
            await clock.advance(0.1)
    await clock.advance(60)
    assert len(ended) > 60
    assert ended == sorted(ended)
    assert all(abs(at_s - now_s) < 1e-6 for at_s, now_s in ended)
    deadlines.close()


async def test_waits_that_are_served_leave_nothing_behind() -> None:
    clock = HandClock()
    deadlines = Deadlines(clock)
    for _ in range(10_000):
        deadlines.add(300.0, lambda: None).cancel()
    assert len(deadlines._heap) < 200
    await clock.advance(0)
    assert clock.sleepers == 1
    await clock.advance(301)
    assert clock.sleepers == 0
    deadlines.close()
