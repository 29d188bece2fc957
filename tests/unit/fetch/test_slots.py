"""Demand runs before background, within bounds, and nothing waits that need not."""

from __future__ import annotations

import asyncio
import random

import pytest

from snapshotter.fetch.slots import Slots, Ticket


class Fetch:
    """A fetch that holds its slot until it is told to end."""

    def __init__(self, slots: Slots, *, demand: bool) -> None:
        self.ticket = Ticket(demand=demand)
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
    slots = Slots(2, 1)
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
    slots = Slots(1, 1)
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
    slots = Slots(1, 1)
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
    slots = Slots(2, 1)
    background, demand = Fetch(slots, demand=False), Ticket(demand=True)
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
    slots = Slots(1, 1)
    background = Fetch(slots, demand=False)
    await settle()
    async with slots.hold(Ticket(demand=True)):
        await slots.give_way(background.ticket, 0.01)
    background.end.set()
    await settle()
    assert slots.running == 0


@pytest.mark.parametrize("seed", range(10))
async def test_no_slot_is_lost_to_cancellations(seed: int) -> None:
    chance, slots = random.Random(seed), Slots(3, 2)
    fetches = [Fetch(slots, demand=chance.random() < 0.5) for _ in range(30)]
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
