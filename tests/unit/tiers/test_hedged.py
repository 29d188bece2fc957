"""A slow read is asked a second time, elsewhere; the first answer wins, and few are asked so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import EmberError, NotFoundError, UnavailableError
from snapshotter.tiers.hedged import HedgedTier
from snapshotter.tiers.latency import HedgeLimits, Latency, Quantile
from tests.fakes.hand_clock import HandClock

BLOB = BlobRef("registry.example/app", Digest("sha256", "0d" * 32), 1_000_000)
DATA = random.Random(5).randbytes(BLOB.size_bytes)
PIECE = 1000
HANG = 1e9


class Place:
    """A tier each of whose pieces takes the next of ``delays`` (then ``delay_s``)."""

    name = "place"

    def __init__(self, clock: HandClock, delay_s: float = 0.01) -> None:
        self.clock = clock
        self.delay_s = delay_s
        self.delays: list[float] = []
        self.errors: list[EmberError] = []
        self.asked: list[Extent] = []
        self.open = 0
        self.most_open = 0
        self.suspected: list[BlobRef] = []

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> AsyncGenerator[bytes, None]:
        self.asked.append(extent)
        return self._send(extent, self.errors.pop(0) if self.errors else None)

    def stream(self, blob: BlobRef, *, demand: bool) -> AsyncGenerator[bytes, None]:
        return self._send(Extent(0, blob.size_bytes), None)

    def suspect(self, blob: BlobRef) -> None:
        self.suspected.append(blob)

    async def _send(self, extent: Extent, error: EmberError | None) -> AsyncGenerator[bytes, None]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for at in range(extent.offset, extent.end, PIECE):
                await self.clock.sleep(self.delays.pop(0) if self.delays else self.delay_s)
                if error is not None:
                    raise error
                yield DATA[at : min(at + PIECE, extent.end)]
        finally:
            self.open -= 1


class Scene:
    """Two places behind a hedged tier, and a hand that turns the clock."""

    def __init__(self, limits: HedgeLimits | None = None, *, same: bool = False) -> None:
        self.clock = HandClock()
        self.first = Place(self.clock)
        self.second = self.first if same else Place(self.clock)
        self.lagging: list[BlobRef] = []
        self.again = 0
        self.tier = HedgedTier(
            self.first,
            self.second,
            self.clock,
            limits,
            lagging=self.lagging.append,
            again=self._count,
        )

    def _count(self) -> None:
        self.again += 1

    def start(self, offset: int = 0, length: int = 3 * PIECE) -> asyncio.Task[bytes]:
        async def read() -> bytes:
            pieces = self.tier.read(BLOB, Extent(offset, length), demand=True)
            async with aclosing(pieces):
                return b"".join([piece async for piece in pieces])

        return asyncio.create_task(read())

    async def finish(self, *tasks: asyncio.Task[bytes], most_s: float = 60.0) -> float:
        """Turn the clock until all are done; how long that took."""
        began_s = self.clock.now_s
        while not all(task.done() for task in tasks):
            assert self.clock.now_s - began_s < most_s, "it hangs"
            await self.clock.advance(0.005)
            for _ in range(3):
                await asyncio.sleep(0)
        return self.clock.now_s - began_s

    async def warm_up(self, reads: int = 20) -> None:
        again = self.again
        for number in range(reads):
            task = self.start(number * PIECE)
            await self.finish(task)
            assert task.result() == DATA[number * PIECE :][: 3 * PIECE]
        assert self.again == again

    def close(self) -> None:
        assert self.first.open == self.second.open == 0


async def test_a_read_that_is_not_slow_is_asked_once() -> None:
    scene = Scene()
    await scene.warm_up()
    assert len(scene.first.asked) == 20
    assert scene.second.asked == []
    scene.close()


async def test_a_silent_place_costs_one_delay() -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delays = [HANG]
    task = scene.start()
    took_s = await scene.finish(task)
    assert task.result() == DATA[: 3 * PIECE]
    assert took_s < 0.2
    assert scene.again == 1
    assert scene.second.asked == [Extent(0, 3 * PIECE)]
    scene.close()


async def test_a_body_that_stalls_is_taken_up_where_it_stands() -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delays = [0.01, 0.01, HANG]
    task = scene.start(500, 5 * PIECE)
    took_s = await scene.finish(task)
    assert task.result() == DATA[500 : 500 + 5 * PIECE]
    assert took_s < 0.5
    assert scene.second.asked == [Extent(500 + 2 * PIECE, 3 * PIECE)]
    scene.close()


async def test_a_connection_that_hangs_is_answered_by_another_of_the_same_place() -> None:
    scene = Scene(same=True)
    await scene.warm_up()
    scene.first.delays = [HANG]
    task = scene.start()
    assert await scene.finish(task) < 0.2
    assert task.result() == DATA[: 3 * PIECE]
    scene.close()


async def test_the_first_answer_wins_whoever_gives_it() -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delays = [0.1]
    scene.second.delays = [HANG]
    task = scene.start()
    assert await scene.finish(task) < 0.3
    assert task.result() == DATA[: 3 * PIECE]
    assert scene.again == 1
    scene.close()


@pytest.mark.parametrize("who", ["first", "second"])
async def test_one_that_fails_leaves_it_to_the_other(who: str) -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delays = [0.2]
    scene.second.delays = [0.3 if who == "first" else 0.02]
    (scene.first if who == "first" else scene.second).errors = [UnavailableError("reset")]
    task = scene.start()
    await scene.finish(task)
    assert task.result() == DATA[: 3 * PIECE]
    scene.close()


async def test_when_both_fail_the_first_error_is_told() -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delays, scene.second.delays = [0.2], [0.3]
    scene.first.errors = [NotFoundError("gone")]
    scene.second.errors = [UnavailableError("reset")]
    task = scene.start()
    await scene.finish(task)
    assert isinstance(task.exception(), NotFoundError)
    scene.close()


async def test_one_that_fails_at_once_is_not_asked_again() -> None:
    scene = Scene()
    scene.first.errors = [UnavailableError("503")]
    task = scene.start()
    await scene.finish(task)
    assert isinstance(task.exception(), UnavailableError)
    assert scene.again == 0
    scene.close()


async def test_a_dead_origin_gets_few_requests_more() -> None:
    limits = HedgeLimits()
    scene = Scene(limits, same=True)
    await scene.warm_up()
    asked = len(scene.first.asked)
    scene.first.delay_s = HANG
    tasks = [scene.start(number * PIECE) for number in range(64)]
    await scene.clock.advance(30)
    assert len(scene.first.asked) - asked <= 64 + limits.at_once
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    scene.close()
    for _ in range(20):  # tried again and again, as a reader's fetch is
        tasks = [scene.start(number * PIECE) for number in range(16)]
        await scene.clock.advance(5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    reads = 20 + 64 + 20 * 16
    assert scene.again <= limits.burst + limits.share * reads
    scene.close()


@pytest.mark.parametrize("seed", range(3))
async def test_an_origin_that_is_slow_now_and_then_gets_one_request_in_twenty_more(
    seed: int,
) -> None:
    limits = HedgeLimits(burst=4)
    scene = Scene(limits)
    chance = random.Random(seed)
    for number in range(400):
        scene.first.delays = [chance.expovariate(1 / 0.1)]
        task = scene.start(number * PIECE)
        await scene.finish(task)
        assert task.result() == DATA[number * PIECE :][: 3 * PIECE]
    assert scene.again <= 400 * 0.05 + 4
    assert scene.again >= 5
    scene.close()


async def test_many_readers_of_a_silent_mirror_wait_for_a_few_delays_and_then_none_does() -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delay_s = HANG
    tasks = [scene.start(number * PIECE) for number in range(32)]
    assert await scene.finish(*tasks) < 0.6
    assert [task.result() for task in tasks] == [
        DATA[number * PIECE :][: 3 * PIECE] for number in range(32)
    ]
    assert scene.lagging == [BLOB]  # once: those that were under way say nothing new
    scene.close()


async def test_a_place_that_answers_now_and_then_is_not_lagging() -> None:
    scene = Scene()
    await scene.warm_up()
    for number in range(30):
        scene.first.delays = [HANG if number % 3 else 0.01]
        task = scene.start()
        await scene.finish(task)
    assert scene.lagging == []
    scene.close()


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.06, 0.1])
async def test_a_reader_that_gives_up_leaves_nothing_open(after_s: float) -> None:
    scene = Scene()
    await scene.warm_up()
    scene.first.delays, scene.second.delays = [HANG], [HANG]
    task = scene.start()
    await scene.clock.advance(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    scene.close()
    assert scene.clock.sleepers == 0


async def test_what_a_read_takes_and_not_the_wait_before_tells_what_is_slow() -> None:
    """Else each second ask would make the next one later."""
    scene = Scene()
    await scene.warm_up(64)
    for _ in range(100):
        scene.first.delays = [HANG]
        task = scene.start()
        assert await scene.finish(task) < 0.2
        await scene.warm_up(19)
    scene.close()


def test_the_quantile_is_of_the_last_samples_only() -> None:
    quantile = Quantile()
    assert quantile.value(1) is None
    for value in range(100):
        quantile.add(float(value))
    assert quantile.value(8) == 96.0  # of 36 to 99
    for _ in range(64):
        quantile.add(1.0)
    assert quantile.value(8) == 1.0


def test_what_is_slow_has_a_floor_and_a_ceiling() -> None:
    limits = HedgeLimits()
    latency = Latency(limits)
    assert latency.slow_s(first=True) == limits.unknown_s
    for _ in range(64):
        latency.took(0.001, first=True)
        latency.took(0.001, first=False)
    assert latency.slow_s(first=True) == limits.floor_s
    assert latency.slow_s(first=False) == limits.piece_floor_s
    for _ in range(64):
        latency.took(10.0, first=True)
    assert latency.slow_s(first=True) == limits.ceiling_s
