"""Readers whom nobody knows of are told of, once, and not where others only wait their turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ioengine.guard import GuardCounts
from snapshotter.imagefs.starved import LOOK_S, Starvation
from tests.fakes.hand_clock import HandClock

NONE = GuardCounts(0, 0, 0, 0, 0, 0, 0, 0, 0, locked=True)


class Guard:
    """A guard that counts what a test says."""

    def __init__(self) -> None:
        self.now = NONE

    def counts(self) -> GuardCounts:
        return self.now


@pytest.mark.parametrize(
    ("paused", "told"),
    [
        (replace(NONE, pauses=1), True),
        (replace(NONE, pauses=1, events=5, outstanding=5), False),
        (replace(NONE, pauses=1, events=5), False),
        (NONE, False),
    ],
)
async def test_only_a_pause_in_which_nothing_is_under_way_is_told(
    paused: GuardCounts, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    guard, clock = Guard(), HandClock()
    starvation = Starvation(guard, clock)
    starvation.start()
    await asyncio.sleep(0)
    guard.now = paused
    for _ in range(3):
        await clock.advance(LOOK_S)
    assert caplog.text.count("no descriptor is left") == int(told)
    await starvation.stop()
