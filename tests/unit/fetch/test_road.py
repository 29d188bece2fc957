"""The road brings right bytes, once, by whatever way is open, and says why when none is."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotter.chunks.presence import decode_header, encode_header
from snapshotter.chunks.space import SpaceLimits
from snapshotter.clock import SystemClock
from snapshotter.content import Digest, Extent
from snapshotter.errors import NotFoundError, UnavailableError
from snapshotter.imagefs.misses import MissPump
from tests.fakes.hand_clock import HandClock
from tests.fakes.tier import FakeTier
from tests.unit.fetch.conftest import Bench, until
from tests.unit.fetch.forms import FORMS, PLAIN
from tests.unit.image.layers import SMALL, frames, member


@pytest.mark.parametrize("form", FORMS)
async def test_every_extent_reads_right(bench: Bench, form: str) -> None:
    view = bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    chance = random.Random(form)
    for _ in range(30):
        offset, length = chance.randrange(len(PLAIN)), chance.randrange(1, 30_000)
        demand = chance.random() < 0.7
        assert (
            await bench.read(view, offset, length, demand=demand) == PLAIN[offset : offset + length]
        )
    assert await bench.read(view, 0, 1 << 40) == PLAIN
    await until(lambda: bench.tier.open_reads == 0)


@pytest.mark.parametrize("form", FORMS)
async def test_many_readers_at_once_read_right(bench: Bench, form: str) -> None:
    view = bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    chance = random.Random(form)
    places = [(chance.randrange(len(PLAIN)), chance.randrange(1, 9000)) for _ in range(200)]
    got = await asyncio.gather(*(bench.read(view, *place) for place in places))
    assert got == [PLAIN[offset : offset + length] for offset, length in places]
    await until(lambda: bench.tier.open_reads == 0)


async def test_the_same_bytes_asked_for_twenty_times_are_fetched_once(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, FORMS["gzip"](PLAIN), bench.tiers)
    bench.tier.gate.clear()
    asks = [asyncio.create_task(bench.read(view, 200_000, 5000)) for _ in range(20)]
    await until(lambda: bench.tier.open_reads == 1)
    asks += [asyncio.create_task(bench.read(view, 200_100, 100)) for _ in range(20)]
    await asyncio.sleep(0)
    bench.tier.gate.set()
    for got in await asyncio.gather(*asks[:20]):
        assert got == PLAIN[200_000:205_000]
    for got in await asyncio.gather(*asks[20:]):
        assert got == PLAIN[200_100:200_200]
    assert len(bench.tier.asked) == 1


async def test_a_reader_does_not_wait_for_the_rest_of_a_fetch(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    whole = asyncio.create_task(bench.read(view, 0, len(PLAIN)))
    await until(lambda: bench.tier.sent_bytes > 20_000)
    bench.tier.gate.clear()
    assert await bench.read(view, 0, 4096) == PLAIN[:4096]
    assert not whole.done()
    bench.tier.gate.set()
    assert await whole == PLAIN


async def test_reading_on_continues_the_decoder_and_fetches_nothing_twice(bench: Bench) -> None:
    blob = member(PLAIN, memory_level=1)
    view = bench.layers.add(PLAIN, blob, bench.tiers)
    for offset in range(0, len(PLAIN), 6000):
        assert await bench.read(view, offset, 6000) == PLAIN[offset : offset + 6000]
    received = sum(ask.extent.length for ask in bench.tier.asked if ask.extent is not None)
    assert received <= len(blob) * 1.02


async def test_a_cancelled_reader_does_not_take_others_with_it(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.gate.clear()
    first, second = (asyncio.create_task(bench.read(view, 0, 9000)) for _ in range(2))
    await until(lambda: bench.tier.open_reads == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    bench.tier.gate.set()
    assert await second == PLAIN[:9000]
    assert len(bench.tier.asked) == 1


async def test_work_that_nobody_wants_any_more_ends(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.gate.clear()
    asks = [asyncio.create_task(bench.read(view, 0, 9000)) for _ in range(3)]
    await until(lambda: bench.tier.open_reads == 1)
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    await until(lambda: bench.tier.open_reads == 0)
    bench.tier.gate.set()
    assert await bench.read(view, 0, 9000) == PLAIN[:9000]


async def test_a_demand_read_promotes_queued_background_work(bench: Bench) -> None:
    await bench.close()
    await bench.open(background_slots=1)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.gate.clear()
    asks = [
        asyncio.create_task(bench.read(view, at, 4096, demand=False)) for at in (0, 40_960, 204_800)
    ]
    await until(lambda: bench.tier.open_reads == 1)
    urgent = asyncio.create_task(bench.read(view, 204_800, 100))
    await until(lambda: bench.tier.open_reads == 2)
    assert bench.tier.asked[-1].extent == Extent(204_800, 4096)
    assert bench.tier.asked[-1].demand
    bench.tier.gate.set()
    assert await urgent == PLAIN[204_800:204_900]
    await asyncio.gather(*asks)
    assert len(bench.tier.asked) == 3


@pytest.mark.parametrize("form", FORMS)
async def test_a_reader_gets_the_room_that_background_work_must_leave(
    bench: Bench, form: str
) -> None:
    urgent: list[asyncio.Task[bytes]] = []

    async def somebody_comes(length_bytes: int) -> int:
        urgent.append(asyncio.create_task(bench.read(view, 120_000, 100)))
        for _ in range(20):
            await asyncio.sleep(0)
        return 0

    await bench.close()
    bench.evict = somebody_comes
    await bench.open(space=SpaceLimits(ballast_bytes=0, keep_free_bytes=1 << 60))
    view = bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    ahead = asyncio.create_task(bench.read(view, 100_000, 50_000, demand=False))
    await until(lambda: bool(urgent))
    assert await urgent[0] == PLAIN[120_000:120_100]
    await asyncio.gather(ahead, *urgent)


async def test_background_work_does_not_start_while_somebody_waits(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.gate.clear()
    urgent = asyncio.create_task(bench.read(view, 0, 100))
    await until(lambda: bench.tier.open_reads == 1)
    patient = asyncio.create_task(bench.read(view, 100_000, 100, demand=False))
    for _ in range(50):
        await asyncio.sleep(0)
    assert bench.tier.open_reads == 1
    bench.tier.gate.set()
    assert await urgent == PLAIN[:100]
    assert await patient == PLAIN[100_000:100_100]


@pytest.mark.parametrize("form", FORMS)
async def test_completion_brings_the_rest_and_nothing_twice(bench: Bench, form: str) -> None:
    blob = FORMS[form](PLAIN)
    view = bench.layers.add(PLAIN, blob, bench.tiers)
    await bench.read(view, 150_000, 3)
    await bench.road.complete(view)
    opened = bench.store.get(view)
    assert opened is not None
    assert opened.complete
    assert opened.durable_count == opened.chunk_count
    assert opened.path.read_bytes()[: len(PLAIN)] == PLAIN
    asked = len(bench.tier.asked)
    await bench.road.complete(view)
    assert len(bench.tier.asked) == asked


async def test_a_view_whose_first_blob_is_gone_comes_from_the_other(bench: Bench) -> None:
    other = FakeTier("other")
    view = bench.layers.add(PLAIN, member(PLAIN), [other], where="r/one")
    assert bench.layers.add(PLAIN, frames(PLAIN, 30_000), bench.tiers, where="r/two") == view
    assert await bench.read(view, 123_456, 20_000) == PLAIN[123_456:143_456]


@pytest.mark.parametrize("form", ["gzip", "zstd frame"])
async def test_when_the_only_blob_is_gone_another_is_looked_for(bench: Bench, form: str) -> None:
    view = bench.layers.add(PLAIN, FORMS["gzip members"](PLAIN), bench.tiers)
    bench.tier.blobs.clear()
    bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    bench.layers.later[view] = [bench.layers.sources[view].pop()]
    places = [(n * 30_000, 5000) for n in range(13)]
    got = await asyncio.gather(*(bench.read(view, *place) for place in places))
    assert got == [PLAIN[offset : offset + length] for offset, length in places]
    whole = [asked for asked in bench.tier.asked if asked.extent and asked.extent.offset == 0]
    assert form == "gzip" or len({asked.digest for asked in whole}) <= 2


async def test_after_a_restart_only_what_is_missing_is_fetched(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, member(PLAIN, memory_level=1), bench.tiers)
    await bench.read(view, 0, 100_000)
    await bench.close()
    await bench.open()
    bench.tier.asked.clear()
    assert await bench.read(view, 0, 100_000) == PLAIN[:100_000]
    assert bench.tier.asked == []
    assert await bench.read(view, 100_000, 100_000) == PLAIN[100_000:200_000]
    assert bench.tier.asked


async def test_a_view_without_a_layer_is_not_found(bench: Bench) -> None:
    with pytest.raises(NotFoundError, match="no layer is known"):
        await bench.road.ensure(Digest("sha256", "0" * 64), Extent(0, 1), demand=True)


async def test_closing_tells_those_who_wait(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.gate.clear()
    ask = asyncio.create_task(bench.read(view, 0, 100))
    await until(lambda: bench.tier.open_reads == 1)
    await bench.road.close()
    with pytest.raises(UnavailableError, match="was stopped"):
        await ask
    assert bench.tier.open_reads == 0
    with pytest.raises(UnavailableError, match="stopping"):
        await bench.road.ensure(view, Extent(0, 1), demand=True)


async def test_a_missing_windows_file_costs_a_read_from_the_beginning(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, member(PLAIN, memory_level=1), bench.tiers)
    for path in bench.layers.directory.glob("*.win"):
        path.unlink()
    assert await bench.read(view, 300_000, 5000) == PLAIN[300_000:305_000]


async def test_metrics_count_what_came_from_where(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    await bench.read(view, 0, 8192)
    await bench.read(view, 0, 8192)
    text = bench.metrics.render().decode()
    assert 'ember_tier_bytes_total{purpose="demand",tier="fake"} 8192.0' in text
    assert 'ember_tier_chunks_total{purpose="demand",tier="fake"} 2.0' in text
    assert 'ember_asks_total{purpose="demand",result="hit"} 1.0' in text


async def test_metrics_show_the_fetches_that_are_under_way(bench: Bench) -> None:
    def shown(state: str) -> bool:
        return f'ember_jobs{{state="{state}"}} 1.0' in bench.metrics.render().decode()

    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    assert not shown("running")
    bench.tier.gate.clear()
    ask = asyncio.create_task(bench.read(view, 0, 8192))
    await until(lambda: shown("running") or ask.done())
    assert not ask.done(), ask
    assert not shown("queued")
    bench.tier.gate.set()
    await ask
    await until(lambda: not shown("running"))


async def test_completion_lets_go_of_a_view_that_is_closed_under_it(bench: Bench) -> None:
    clock = HandClock()
    await bench.close()
    await bench.open(clock=clock, window_bytes=64_000)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    completing = asyncio.create_task(bench.road.complete(view, 10_000))
    await until(lambda: clock.sleepers > 0 and bool(bench.store.get(view)))
    await bench.road.stop(view)
    await bench.store.drop(view)
    asked = len(bench.tier.asked)
    while not completing.done():
        await clock.advance(10.0)
    await completing
    assert len(bench.tier.asked) == asked
    assert bench.store.get(view) is None


async def after_a_power_loss(bench: Bench, view: Digest, *, lost: int | None = None) -> None:
    """Open again what another boot left, chunk ``lost`` never having reached the disk."""
    await bench.close()
    presence = bench.root / "presence" / view.hex
    raw = presence.read_bytes()
    header = replace(decode_header(raw[:512]), boot=bytes(16), clean=False)
    presence.write_bytes(encode_header(header) + raw[512:])
    if lost is not None:
        with (bench.root / "views" / view.hex).open("r+b") as file:
            file.seek(lost * SMALL.chunk_bytes)
            file.write(bytes(100))
    await bench.open()


@pytest.mark.parametrize("lost", [None, 3])
async def test_completion_proves_what_a_power_loss_left_in_doubt(
    bench: Bench, lost: int | None
) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    await bench.road.complete(view)
    await after_a_power_loss(bench, view, lost=lost)
    asked = len(bench.tier.asked)
    await bench.road.complete(view)
    opened = bench.store.get(view)
    assert opened is not None
    assert opened.complete
    assert opened.path.read_bytes()[: len(PLAIN)] == PLAIN
    assert len(bench.tier.asked) - asked == (0 if lost is None else 1)


async def test_a_layer_of_zeros_does_not_come_out_all_at_once(bench: Bench) -> None:
    plain = bytes(40_000_000)
    view = bench.layers.add(plain, member(plain), bench.tiers)
    for demand, offset in ((True, 0), (True, 39_000_000), (False, 20_000_000)):
        assert await bench.read(view, offset, 100_000, demand=demand) == bytes(100_000)
    await bench.road.complete(view)
    opened = bench.store.get(view)
    assert opened is not None
    assert opened.complete


async def test_a_read_of_a_view_that_is_let_go_of_is_served_all_the_same(bench: Bench) -> None:
    """A container has outlived the mount: its miss comes while the view is being closed."""
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    await bench.read(view, 0, 10)
    parts: Any = SimpleNamespace(fileno=lambda: -1)
    pump = MissPump(parts, bench.road, parts, SystemClock(), 20.0)
    bench.tier.gate.clear()
    await bench.road.stop(view)
    miss = asyncio.create_task(pump._have(view, Extent(300_000, 100)))
    await until(lambda: bench.tier.open_reads == 1)
    await bench.store.release(view)
    bench.tier.gate.set()
    assert await miss is None
    assert await bench.read(view, 300_000, 100) == PLAIN[300_000:300_100]


async def test_what_lies_right_behind_a_reader_comes_with_its_range(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    size = SMALL.chunk_bytes
    ahead = asyncio.create_task(bench.read(view, 11 * size, 20 * size, demand=False))
    assert await bench.read(view, 10 * size, 100) == PLAIN[10 * size : 10 * size + 100]
    await ahead
    assert [asked.extent for asked in bench.tier.asked] == [Extent(10 * size, 21 * size)]
