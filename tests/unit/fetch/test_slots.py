"""Demand runs before background, within bounds, nobody takes all, and none waits that need not."""

from __future__ import annotations

import asyncio
import random

import pytest

from snapshotter.config import parse
from snapshotter.daemon.opening import road_limits
from snapshotter.fetch.slots import QUIET_S, Slots, Ticket
from tests.fakes.hand_clock import HandClock

SOON_S = QUIET_S + 1


def slots_of(
    demand: int, background: int, most_of_one: int | None = None, clock: HandClock | None = None
) -> Slots:
    return Slots(demand, background, most_of_one, clock=clock or HandClock())


class Fetch:
    """A fetch that holds its slot until it is told to end; by default its owner has no other."""

    def __init__(self, slots: Slots, *, demand: bool, owner: str | None = None) -> None:
        self.ticket = Ticket(self if owner is None else owner, demand=demand)
        self.end = asyncio.Event()
        self.runs = False
        self.task = asyncio.create_task(self._run(slots))

    async def _run(self, slots: Slots) -> None:
        async with slots.hold(self.ticket):
            self.runs = True
            try:
                await self.end.wait()
            finally:
                self.runs = False


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_demand_has_slots_of_its_own_and_goes_first() -> None:
    slots = slots_of(2, 1)
    demand = [Fetch(slots, demand=True) for _ in range(3)]
    background = [Fetch(slots, demand=False) for _ in range(2)]
    await settle()
    assert [fetch.runs for fetch in demand + background] == [True, True, False, False, False]
    for fetch in demand:
        fetch.end.set()
    await settle()
    assert [fetch.runs for fetch in background] == [True, False]
    late = Fetch(slots, demand=True)
    await settle()
    assert late.runs
    background[0].end.set()
    await settle()
    assert not background[1].runs
    late.end.set()
    await settle()
    assert background[1].runs
    background[1].end.set()
    await settle()
    assert (slots.running, slots.queued) == (0, 0)


async def test_a_promoted_fetch_leaves_the_queue_of_the_background() -> None:
    slots = slots_of(1, 1)
    first = Fetch(slots, demand=False)
    queued = Fetch(slots, demand=False)
    await settle()
    assert not queued.runs
    slots.promote(queued.ticket)
    await settle()
    assert queued.runs
    slots.promote(first.ticket)  # in mid-run: over the bound for once
    assert slots.running == 2
    first.end.set()
    queued.end.set()
    await settle()
    assert slots.running == 0


async def test_background_stands_aside_until_demand_is_over() -> None:
    slots = slots_of(1, 1)
    background = Fetch(slots, demand=False)
    await settle()
    await slots.give_way(background.ticket, 1000)
    demand = Fetch(slots, demand=True)
    await settle()
    aside = asyncio.create_task(slots.give_way(background.ticket, 1000))
    await settle()
    assert not aside.done()
    demand.end.set()
    await settle()
    assert aside.done()
    background.end.set()
    await settle()


async def test_who_stands_aside_goes_on_when_somebody_waits_for_it() -> None:
    slots = slots_of(2, 1)
    background, demand = Fetch(slots, demand=False), Ticket("demand", demand=True)
    await settle()
    async with slots.hold(demand):
        aside = asyncio.create_task(slots.give_way(background.ticket, 1000))
        await settle()
        assert not aside.done()
        slots.promote(background.ticket)
        await settle()
        assert aside.done()
    background.end.set()
    await settle()


async def test_standing_aside_has_an_end() -> None:
    slots = slots_of(1, 1)
    background = Fetch(slots, demand=False)
    await settle()
    async with slots.hold(Ticket("demand", demand=True)):
        await slots.give_way(background.ticket, 0.01)
    background.end.set()
    await settle()
    assert slots.running == 0


class Crowd:
    """Fetches by name; the first letter of a name is the owner."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._fetches: dict[str, Fetch] = {}

    async def add(self, names: str, *, demand: bool = True) -> None:
        for name in names.split():
            self._fetches[name] = Fetch(self.slots, demand=demand, owner=name[0])
        await settle()

    async def end(self, names: str) -> None:
        for name in names.split():
            self._fetches.pop(name).end.set()
        await settle()

    def heard(self, name: str) -> None:
        self.slots.heard(self._fetches[name].ticket)

    def promote(self, name: str) -> None:
        self.slots.promote(self._fetches[name].ticket)

    async def give_way(self, name: str) -> None:
        await self.slots.give_way(self._fetches[name].ticket, 1000)

    def running(self) -> str:
        return " ".join(sorted(name for name, fetch in self._fetches.items() if fetch.runs))

    async def close(self) -> None:
        await self.end(" ".join(self._fetches))
        while self.slots.running:
            await settle()
        assert (self.slots.running, self.slots.queued) == (0, 0)


async def test_an_owner_takes_half_at_most_and_the_next_one_half_of_what_is_left() -> None:
    crowd = Crowd(slots_of(8, 1))
    await crowd.add("a1 a2 a3 a4 a5 a6 b1 b2 b3 b4")
    assert crowd.running() == "a1 a2 a3 a4 b1 b2"
    await crowd.add("c1 c2 d1 d2")
    assert crowd.running() == "a1 a2 a3 a4 b1 b2 c1 d1"
    await crowd.end("a1 a2")
    assert crowd.running() == "a3 a4 b1 b2 c1 c2 d1"
    await crowd.end("b1 b2 c1 c2 d1")
    assert crowd.running() == "a3 a4 a5 b3 b4 d2"
    await crowd.end("b3 b4 d2")
    assert crowd.running() == "a3 a4 a5 a6"
    await crowd.close()


async def test_who_has_hung_long_leaves_room_for_those_that_come_and_go() -> None:
    crowd = Crowd(slots_of(32, 4))
    await crowd.add(" ".join(f"a{n}" for n in range(40)))
    assert crowd.slots.running == 16
    for n in range(100):
        await crowd.add(f"b{n}")
        assert f"b{n}" in crowd.running()
        await crowd.end(f"b{n}")
    assert (crowd.slots.running, crowd.slots.queued) == (16, 24)
    await crowd.close()


@pytest.mark.parametrize("demand", [True, False])
async def test_however_many_hang_who_does_not_gets_lent_slots(demand: bool) -> None:
    clock = HandClock()
    crowd = Crowd(slots_of(8, 8, clock=clock))
    names = " ".join(f"{owner}{n}" for owner in "abcdefg" for n in range(8))
    await crowd.add(names, demand=demand)
    assert crowd.slots.running == 8
    await crowd.add("x1 x2", demand=demand)
    assert "x1" not in crowd.running()
    await clock.advance(SOON_S)
    crowd.heard("x1")
    await clock.advance(QUIET_S - 0.1)
    assert {"x1", "x2"} <= set(crowd.running().split())
    await crowd.end("x1")
    for n in range(3, 100):
        crowd.heard(f"x{n - 1}")
        await clock.advance(0.1)
        await crowd.add(f"x{n}", demand=demand)
        await crowd.end(f"x{n - 1}")
        assert f"x{n}" in crowd.running()
    for _ in range(20):
        await clock.advance(SOON_S)
        assert crowd.slots.running <= 4 * 8
    await crowd.close()


async def test_background_does_not_stand_still_for_demand_that_is_silent() -> None:
    clock = HandClock()
    crowd = Crowd(slots_of(2, 1, clock=clock))
    await crowd.add("a1 a2 a3")
    await crowd.add("b1 b2", demand=False)
    await clock.advance(QUIET_S - 0.5)
    crowd.heard("a1")
    await clock.advance(QUIET_S - 0.5)
    assert crowd.running() == "a1"
    await clock.advance(SOON_S)
    assert crowd.running() == "a1 b1"
    aside = asyncio.create_task(crowd.give_way("b1"))
    await settle()
    assert aside.done()
    crowd.heard("a1")
    aside = asyncio.create_task(crowd.give_way("b1"))
    await settle()
    await crowd.end("b1")
    assert not aside.done()
    assert crowd.running() == "a1"
    await clock.advance(SOON_S)
    assert aside.done()
    assert crowd.running() == "a1 b2"
    await crowd.close()
    await clock.advance(SOON_S)
    assert not clock.sleepers


async def test_nobody_looks_for_silence_while_nobody_waits() -> None:
    clock = HandClock()
    crowd = Crowd(slots_of(2, 1, clock=clock))
    await crowd.add("a1")
    assert not clock.sleepers
    await crowd.close()


async def test_owners_take_turns_however_much_each_has_to_do() -> None:
    crowd, order = Crowd(slots_of(1, 1)), []
    await crowd.add("a1 a2 a3 b1 c1 b2")
    for _ in range(6):
        order.append(crowd.running())
        await crowd.end(order[-1])
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2"]
    await crowd.close()


async def test_a_bound_below_half_of_the_slots_holds_too() -> None:
    crowd = Crowd(slots_of(16, 16, most_of_one=2))
    await crowd.add("a1 a2 a3 b1 b2 b3")
    assert crowd.running() == "a1 a2 b1 b2"
    await crowd.end("a1 a2 a3 b1 b2 b3")
    await crowd.add("c1 c2 c3 d1", demand=False)
    assert crowd.running() == "c1 c2 d1"
    await crowd.close()


async def test_what_is_promoted_counts_among_its_owner_s_demand() -> None:
    crowd = Crowd(slots_of(4, 4))
    await crowd.add("a1 a2", demand=False)
    crowd.promote("a1")
    crowd.promote("a2")
    await crowd.add("a3 b1")
    assert crowd.running() == "a1 a2 b1"
    await crowd.end("a1")
    assert crowd.running() == "a2 a3 b1"
    await crowd.close()


def test_one_view_leaves_connections_and_a_silent_host_is_noted_before_its_read_is_cut() -> None:
    config = parse("", "test")
    registry, limits = config.registry, road_limits(config)
    assert registry.connections_per_host > limits.demand_slots + limits.background_slots
    assert limits.stall_s >= 2 * (registry.connect_timeout + registry.read_timeout)
    assert limits.stall_s < limits.miss_timeout_s
    few = road_limits(parse("[registry]\nconnections_per_host = 8\n", "test"))
    assert few.most_of_one == 4
    assert few.background_slots == 4
    assert road_limits(parse("[registry]\nconnections_per_host = 1\n", "test")).most_of_one == 1


@pytest.mark.parametrize("seed", range(10))
async def test_no_slot_is_lost_to_cancellations(seed: int) -> None:
    chance, slots = random.Random(seed), slots_of(3, 2)
    fetches = [
        Fetch(slots, demand=chance.random() < 0.5, owner=chance.choice("abc")) for _ in range(30)
    ]
    for fetch in chance.sample(fetches, 30):
        what = chance.randrange(4)
        if what == 0:
            fetch.task.cancel()
        elif what == 1:
            slots.promote(fetch.ticket)
        else:
            fetch.end.set()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    for fetch in fetches:
        fetch.end.set()
    await asyncio.gather(*(fetch.task for fetch in fetches), return_exceptions=True)
    assert (slots.running, slots.queued) == (0, 0)
    again = Fetch(slots, demand=False)
    await settle()
    assert again.runs
    again.end.set()
    await again.task
