"""What the road makes of tiers: liars, busy ones, silent ones, fast ones, and none at all."""

from __future__ import annotations

import asyncio
import random

import pytest

from snapshotter.clock import SystemClock
from snapshotter.errors import DeadlineError
from snapshotter.tiers.hedged import HedgedTier
from snapshotter.tiers.latency import HedgeLimits
from tests.fakes.hand_clock import HandClock
from tests.fakes.tier import FakeTier, SeededFaults
from tests.unit.fetch.conftest import QUICK, Bench, until
from tests.unit.fetch.forms import FORMS, PLAIN
from tests.unit.image.layers import frame, member, text


@pytest.mark.parametrize("way", SeededFaults(0).ways)
async def test_a_read_that_goes_wrong_is_tried_again(bench: Bench, way: str) -> None:
    view = bench.layers.add(PLAIN, member(PLAIN, memory_level=1), bench.tiers)
    bench.tier.script = [way, way]
    bench.tier.retry_after_s = 0.001
    assert await bench.read(view, 100_000, 50_000) == PLAIN[100_000:150_000]
    await until(lambda: bench.tier.open_reads == 0)


@pytest.mark.parametrize("seed", range(12))
async def test_bytes_are_right_whatever_the_tiers_do(bench: Bench, seed: int) -> None:
    form = list(FORMS)[seed % len(FORMS)]
    second = FakeTier("second", piece_bytes=700)
    bench.tiers.append(second)
    await bench.close()
    await bench.open()
    view = bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    for tier in bench.tiers:
        tier.faults = SeededFaults(seed, rate=0.5)
        tier.retry_after_s = 0.001
    chance = random.Random(seed)
    places = [(chance.randrange(len(PLAIN)), chance.randrange(1, 20_000)) for _ in range(60)]
    asks = [
        asyncio.create_task(bench.read(view, *place, demand=chance.random() < 0.6))
        for place in places
    ]
    for ask in chance.sample(asks, 10):
        await asyncio.sleep(0)
        ask.cancel()
    got = await asyncio.gather(*asks, return_exceptions=True)
    for (offset, length), data in zip(places, got, strict=True):
        if not isinstance(data, asyncio.CancelledError):
            assert data == PLAIN[offset : offset + length]
    opened = bench.store.get(view)
    assert opened is not None
    # Work for readers that are gone may go on: what is readable first, then what is there.
    readable = [number for number in range(opened.chunk_count) if opened.is_readable(number)]
    raw = opened.path.read_bytes()
    for number in readable:
        at = number * opened.chunk_bytes
        length = opened.length_of(number)
        assert raw[at : at + length] == PLAIN[at : at + length]
    await until(lambda: all(tier.open_reads == 0 for tier in bench.tiers))


async def test_a_tier_that_lies_is_told_and_its_bytes_are_not_kept(bench: Bench) -> None:
    honest = FakeTier("honest")
    bench.tiers.append(honest)
    await bench.close()
    await bench.open()
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.always = "flipped"
    assert await bench.read(view, 0, 4096) == PLAIN[:4096]
    assert bench.tier.suspected
    assert bench.road.tally(view).corrupt == 1
    assert bench.road.tally(view).chunks_by_tier == {"honest": 1}
    await bench.read(view, 100_000, 10)
    assert len(bench.tier.asked) == 1  # its rank fell


async def test_busy_and_missing_do_not_lower_a_rank(bench: Bench) -> None:
    second = FakeTier("second")
    bench.tiers.append(second)
    await bench.close()
    clock = HandClock()
    await bench.open(clock=clock)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["missing", "busy"]
    bench.tier.retry_after_s = 60
    await bench.read(view, 0, 10)
    await bench.read(view, 10_000, 10)
    assert [len(tier.asked) for tier in bench.tiers] == [2, 2]
    await bench.read(view, 20_000, 10)
    assert [len(tier.asked) for tier in bench.tiers] == [3, 2]


async def test_a_tier_that_is_busy_for_one_reader_may_not_be_for_another(bench: Bench) -> None:
    await bench.close()
    clock = HandClock()
    await bench.open(clock=clock)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["busy"]  # for the credential of the first
    bench.tier.retry_after_s = 30
    first = asyncio.create_task(bench.read(view, 0, 10, deadline_s=100))
    await until(lambda: clock.sleepers >= 2)  # deadline and rest
    async with asyncio.timeout(5):
        assert await bench.read(view, 30_000, 10) == PLAIN[30_000:30_010]
    assert not first.done()
    await clock.advance(31)
    assert await first == PLAIN[:10]


async def test_retry_after_is_honoured_when_all_are_busy(bench: Bench) -> None:
    await bench.close()
    clock = HandClock()
    await bench.open(clock=clock)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["busy"]
    bench.tier.retry_after_s = 30
    ask = asyncio.create_task(bench.read(view, 0, 10, deadline_s=100))
    await until(lambda: clock.sleepers >= 2)  # deadline and rest
    await clock.advance(29)
    assert len(bench.tier.asked) == 1
    await clock.advance(2)
    assert await ask == PLAIN[:10]
    assert len(bench.tier.asked) == 2


async def test_a_deadline_says_for_each_tier_what_failed(bench: Bench) -> None:
    second = FakeTier("second")
    bench.tiers.append(second)
    await bench.close()
    clock = HandClock()
    await bench.open(clock=clock)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.always, second.always = "unavailable", "missing"
    ask = asyncio.create_task(bench.read(view, 0, 10, deadline_s=5))
    await until(lambda: clock.sleepers >= 2)
    await clock.advance(6)
    with pytest.raises(DeadlineError, match="in 5 s: fake: fake: 503; second: second: no such"):
        await ask
    assert bench.road.tally(view).failed_asks == 1
    bench.tier.always = ""
    again = asyncio.create_task(bench.read(view, 0, 10))
    await until(again.done)  # the next read tries again
    assert await again == PLAIN[:10]


async def test_an_origin_without_ranges_is_streamed_once_for_all(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, member(PLAIN), bench.tiers)
    bench.tier.always = "rangeless"
    places = [(at, 5000) for at in range(0, len(PLAIN), 40_000)]
    got = await asyncio.gather(*(bench.read(view, *place) for place in reversed(places)))
    assert list(reversed(got)) == [PLAIN[at : at + length] for at, length in places]
    await until(lambda: bench.tier.open_reads == 0)
    assert sum(ask.extent is None for ask in bench.tier.asked) == 1
    opened = bench.store.get(view)
    assert opened is not None
    await until(lambda: opened.whole)


async def test_a_lasting_stream_survives_its_first_reader(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, frame(PLAIN), bench.tiers)
    bench.layers.sources[view][0].index.longest_run_bytes = 1 << 30
    assert await bench.read(view, 0, 100) == PLAIN[:100]
    opened = bench.store.get(view)
    assert opened is not None
    await until(lambda: opened.whole)
    assert len(bench.tier.asked) == 1


async def test_a_tier_that_hangs_is_left_after_its_patience(bench: Bench) -> None:
    await bench.close()
    await bench.open(stall_s=0.02)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["hang"]
    assert await bench.read(view, 0, 50_000) == PLAIN[:50_000]
    assert "sent nothing" in bench.road.tally(view).last_failure
    assert QUICK.stall_s > 0.02


@pytest.mark.parametrize("demand", [True, False])
@pytest.mark.parametrize("form", ["plain", "gzip"])
async def test_a_tier_faster_than_the_disk_is_held_back(
    bench: Bench, form: str, demand: bool
) -> None:
    plain = text(6_000_000, seed=4)
    bench.tiers.append(FakeTier("fast", piece_bytes=900_000))
    await bench.close()
    await bench.open()
    view = bench.layers.add(plain, FORMS[form](plain), bench.tiers[1:])
    assert await bench.read(view, 0, len(plain), demand=demand) == plain


async def test_what_came_before_a_tier_broke_off_is_kept(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["short"]
    assert await bench.read(view, 0, 200_000) == PLAIN[:200_000]
    again = [ask.extent for ask in bench.tier.asked if ask.extent is not None]
    assert again[0].offset == 0
    assert again[1].offset >= 90_000


@pytest.mark.parametrize("demand", [True, False])
async def test_who_joins_a_fetch_that_hangs_waits_for_one_second_ask(
    bench: Bench, demand: bool
) -> None:
    await bench.close()
    limits = HedgeLimits(unknown_s=0.02, piece_floor_s=0.02, floor_s=0.02)
    clock = SystemClock()
    await bench.open(stall_s=60.0, wrap=lambda tier: HedgedTier(tier, tier, clock, limits))
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["hang"]
    first = asyncio.create_task(bench.read(view, 0, 60_000, demand=demand))
    await until(lambda: bench.tier.sent_bytes >= 40_000)
    assert await bench.read(view, 41_000, 4000) == PLAIN[41_000:45_000]
    assert await first == PLAIN[:60_000]
    assert len(bench.tier.asked) == 2
    await until(lambda: bench.tier.open_reads == 0)
