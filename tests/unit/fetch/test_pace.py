"""As many connections as are worth it: more where more bring more, fewer where they are refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from snapshotter.errors import BusyError, UnavailableError
from snapshotter.fetch.pace import Connections, Origins, origin_of
from snapshotter.fetch.slots import Slots, Ticket
from tests.fakes.hand_clock import HandClock

TICK_S = 0.05
MB = 1_000_000


class Origin:
    """Readers of ranges, against an origin whose rate follows from how many read at once."""

    def __init__(self, rate: Callable[[int], float], most: int = 32, readers: int = 40) -> None:
        self.clock = HandClock()
        self.origins = Origins(self.clock, most=most)
        self.connections = self.origins.of("registry")
        self.slots = Slots(1, most, most, self.origins.allowed, clock=self.clock)
        self.origins.grown = self.slots.look_again
        self.rate = rate
        self.most_at_once: int | None = None
        self.resets: random.Random | None = None
        self.highest = 0
        self.received = 0.0
        self._tasks = [asyncio.create_task(self._reader(number)) for number in range(readers)]

    async def _reader(self, number: int) -> None:
        while True:
            try:
                async with self.slots.hold(Ticket(number, demand=False, origin="registry")):
                    await self._read()
            except BusyError:
                await self.clock.sleep(1.0)
            except UnavailableError:
                await self.clock.sleep(TICK_S)

    async def _read(self) -> None:
        with self.connections.running():
            self.highest = max(self.highest, self.connections.open)
            if self.most_at_once is not None and self.connections.open > self.most_at_once:
                raise BusyError("too many")
            for _ in range(4):
                await self.clock.sleep(TICK_S)
                length = int(self.rate(self.connections.open) * TICK_S)
                self.received += length
                self.connections.received(length)
            if self.resets is not None and self.resets.random() < 0.1:
                raise UnavailableError("reset")

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            await self.clock.advance(TICK_S)
            for _ in range(4):
                await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.connections.open == 0


async def test_an_origin_that_throttles_each_connection_gets_as_many_as_there_may_be() -> None:
    origin = Origin(lambda readers: 2 * MB)
    await origin.run(10)
    assert origin.connections.allowed == 32
    await origin.close()


async def test_a_full_link_gets_few() -> None:
    origin = Origin(lambda readers: 25 * MB / readers)
    await origin.run(60)
    assert origin.connections.allowed <= 5
    await origin.close()


async def test_throttled_connections_stop_growing_when_the_link_is_full() -> None:
    origin = Origin(lambda readers: min(2 * MB, 25 * MB / readers))
    await origin.run(60)
    assert 10 <= origin.connections.allowed <= 20
    await origin.close()


async def test_an_origin_that_says_too_many_gets_half_and_is_not_asked_more_soon() -> None:
    origin = Origin(lambda readers: 2 * MB)
    origin.most_at_once = 6
    await origin.run(20)
    assert 2 <= origin.connections.allowed <= 6
    assert origin.highest <= 8
    await origin.close()


async def test_many_refusals_at_once_are_one() -> None:
    clock = HandClock()
    connections = Connections(clock, most=32, first=16)

    async def refused() -> None:
        with connections.running():
            await clock.sleep(1.0)
            raise BusyError("429")

    tasks = [asyncio.create_task(refused()) for _ in range(16)]
    await asyncio.sleep(0)
    await clock.advance(1.0)
    assert all(
        isinstance(e, BusyError) for e in await asyncio.gather(*tasks, return_exceptions=True)
    )
    assert connections.allowed == 8
    assert connections.open == 0


@pytest.mark.parametrize("seed", range(3))
async def test_one_reset_in_ten_costs_no_connections(seed: int) -> None:
    origin = Origin(lambda readers: 2 * MB, most=16)
    origin.resets = random.Random(seed)
    await origin.run(30)
    assert origin.connections.allowed >= 12
    await origin.close()


async def test_an_origin_that_breaks_off_everything_gets_one() -> None:
    clock = HandClock()
    connections = Connections(clock, most=32, first=16)
    for _ in range(60):
        with pytest.raises(UnavailableError), connections.running():
            raise UnavailableError("reset")
    assert connections.allowed == 1


async def test_a_number_that_was_never_used_is_not_judged() -> None:
    origin = Origin(lambda readers: 2 * MB, readers=1)
    await origin.run(20)
    assert origin.connections.allowed == 4
    await origin.close()


async def test_origins_that_are_not_in_use_are_forgotten() -> None:
    origins = Origins(HandClock(), most=8)
    used = origins.of("used.example")
    with used.running():
        for number in range(1000):
            origins.of(f"r{number}.example")
        assert origins.of("used.example") is used
    assert len(origins._known) <= 256


def test_repositories_of_one_registry_share_its_connections() -> None:
    assert origin_of("one.example:5000/a/b") == origin_of("one.example:5000/c")
    assert origin_of("one.example:5000/a") != origin_of("one.example/a")


async def test_one_origin_that_refuses_leaves_the_others_their_fetches() -> None:
    slots = Slots(1, 8, 8, {"strict": 1, "kind": 8}.__getitem__, clock=HandClock())
    running = list[str]()
    end = asyncio.Event()

    async def fetch(number: int, origin: str) -> None:
        async with slots.hold(Ticket(number, demand=False, origin=origin)):
            running.append(origin)
            await end.wait()

    tasks = [asyncio.create_task(fetch(n, "strict" if n < 5 else "kind")) for n in range(10)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(running) == ["kind"] * 5 + ["strict"]
    end.set()
    await asyncio.gather(*tasks)
    assert sorted(running) == ["kind"] * 5 + ["strict"] * 5
