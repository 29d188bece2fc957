"""Background completion: every view once a round, and never a turn that waits for nothing."""

from __future__ import annotations

import asyncio
import hashlib

from snapshotter.content import Digest
from snapshotter.errors import UnavailableError
from snapshotter.imagefs.completion import RETRY_S, Completion
from tests.fakes.hand_clock import HandClock

VIEWS = [Digest("sha256", hashlib.sha256(bytes([n])).hexdigest()) for n in range(3)]
TURNS = 50


class FakeRoad:
    """Completes what it is asked to, but what is ``stuck`` stays as it is, at once."""

    def __init__(self) -> None:
        self.incomplete = list(VIEWS)
        self.stuck: set[Digest] = set()
        self.down: set[Digest] = set()
        self.asked: list[Digest] = []

    async def complete(self, view: Digest, bytes_per_s: int | None = None) -> None:
        self.asked.append(view)
        if view in self.down:
            raise UnavailableError("registry is down")
        if view not in self.stuck:
            self.incomplete.remove(view)


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_a_view_that_stays_incomplete_is_tried_once_a_round() -> None:
    road, clock = FakeRoad(), HandClock()
    road.stuck, road.down = {VIEWS[0]}, {VIEWS[1]}
    completion = Completion(road, lambda: road.incomplete, clock, 30.0, None)
    completion.start()
    await settle()
    assert road.asked == []
    await clock.advance(30.0)
    await settle()
    assert road.asked == VIEWS
    assert road.incomplete == VIEWS[:2]
    road.stuck.clear()
    road.down.clear()
    road.incomplete.append(VIEWS[2])
    road.asked.clear()
    completion.wake()  # heard during the pause after a failure
    await settle()
    await clock.advance(30.0)
    await settle()
    assert road.incomplete == []
    assert completion.current is None
    await completion.stop()


async def test_what_failed_is_tried_again_later() -> None:
    road, clock = FakeRoad(), HandClock()
    road.down = {VIEWS[1]}
    completion = Completion(road, lambda: road.incomplete, clock, 30.0, None)
    completion.start()
    await settle()
    await clock.advance(30.0)
    await settle()
    assert road.incomplete == [VIEWS[1]]
    road.down.clear()
    await clock.advance(RETRY_S)
    await settle()
    await clock.advance(30.0)
    await settle()
    assert road.incomplete == []
    assert completion.current is None
    await completion.stop()
