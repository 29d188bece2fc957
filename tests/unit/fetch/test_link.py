"""What a request costs is found out, and what would cost less than that is fetched along."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from snapshotter.content import Extent
from snapshotter.fetch.link import Link
from tests.fakes.hand_clock import HandClock
from tests.unit.fetch.conftest import QUICK, Bench
from tests.unit.fetch.forms import PLAIN
from tests.unit.image.layers import SMALL


async def fetch(link: Link, clock: HandClock, begins_s: float, rate: float) -> None:
    measure = link.measure()
    await clock.advance(begins_s)
    measure.piece(1000)
    for _ in range(10):
        await clock.advance(10_000 / rate)
        measure.piece(10_000)
    measure.end()


async def test_it_is_the_latency_times_the_rate() -> None:
    clock = HandClock()
    link = Link(clock)
    assert link.request_bytes == 0
    await fetch(link, clock, 0.02, 25e6)
    assert abs(link.request_bytes - 500_000) < 10_000
    for _ in range(100):  # the link has become another
        await fetch(link, clock, 0.1, 1e6)
    assert abs(link.request_bytes - 100_000) < 5000


async def test_fetches_of_one_piece_say_nothing_of_the_rate() -> None:
    clock = HandClock()
    link = Link(clock)
    measure = link.measure()
    measure.end()
    await clock.advance(0.5)
    measure.piece(4096)
    measure.end()
    assert link.request_bytes == 0


async def test_neighbours_come_with_one_range_where_a_request_costs_more(bench: Bench) -> None:
    size = SMALL.chunk_bytes
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    await bench.close()
    await bench.open(replace(QUICK, gap_most_bytes=4 * size))

    async def two(at: int) -> list[Extent | None]:
        bench.tier.asked.clear()
        await asyncio.gather(*(bench.read(view, (at + n) * size, 10) for n in (0, 4)))
        return [asked.extent for asked in bench.tier.asked]

    link = bench.road._crew.link
    link.began(0.001)
    link.came(1_000_000, 1.0)
    assert len(await two(0)) == 2
    for _ in range(100):
        link.began(1.0)
        link.came(1_000_000, 1.0)
    assert await two(10) == [Extent(10 * size, 5 * size)]
