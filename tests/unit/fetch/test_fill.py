"""Whole views: several ranges at once, cut where decoding begins, behind whoever waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from snapshotter.content import Digest, Extent
from snapshotter.errors import NoSpaceError, NotFoundError, UnavailableError
from tests.unit.fetch.conftest import Bench, until
from tests.unit.fetch.forms import FORMS, PLAIN
from tests.unit.image.layers import member


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    return FORMS[request.param]


async def is_whole(bench: Bench, view: Digest) -> bool:
    opened = bench.store.get(view)
    assert opened is not None
    return opened.complete and opened.path.read_bytes()[: len(PLAIN)] == PLAIN


@pytest.mark.parametrize("at_once", [1, 3, 64])
async def test_all_of_a_view_comes_and_is_right(
    bench: Bench, form: Callable[[bytes], bytes], at_once: int
) -> None:
    view = bench.layers.add(PLAIN, form(PLAIN), bench.tiers)
    await bench.road.complete(view, at_once=at_once)
    assert await is_whole(bench, view)
    asked = len(bench.tier.asked)
    await bench.road.complete(view, at_once=at_once)
    assert len(bench.tier.asked) == asked


async def test_several_ranges_are_under_way_at_once_and_hardly_overlap(bench: Bench) -> None:
    await bench.close()
    await bench.open(background_slots=8)
    blob = member(PLAIN, memory_level=4)
    view = bench.layers.add(PLAIN, blob, bench.tiers)
    bench.tier.gate.clear()
    filling = asyncio.create_task(bench.road.complete(view, at_once=4))
    await until(lambda: bench.tier.open_reads == 4)
    bench.tier.gate.set()
    await filling
    extents = sorted((a.extent for a in bench.tier.asked if a.extent), key=lambda one: one.offset)
    assert len(extents) >= 4
    assert sum(extent.length for extent in extents) < 1.15 * len(blob)


async def test_only_what_is_missing_is_fetched_after_an_end_in_the_middle(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    filling = asyncio.create_task(bench.road.complete(view, at_once=2))
    opened = bench.store.get
    await until(lambda: (found := opened(view)) is not None and found.readable_count > 40)
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    await until(lambda: bench.tier.open_reads == 0)
    found = opened(view)
    assert found is not None
    missing = found.chunk_count - found.readable_count
    before = bench.tier.sent_bytes
    await bench.road.complete(view, at_once=2)
    assert bench.tier.sent_bytes - before <= missing * found.chunk_bytes
    assert await is_whole(bench, view)


async def test_a_reader_goes_before_a_fill(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    other = bench.layers.add(PLAIN[::-1], PLAIN[::-1], bench.tiers)
    bench.tier.gate.clear()
    filling = asyncio.create_task(bench.road.complete(view, at_once=8))
    await until(lambda: bench.tier.open_reads > 0)
    reading = asyncio.create_task(bench.read(other, 0, 5000))
    await until(lambda: any(asked.demand for asked in bench.tier.asked))
    bench.tier.gate.set()
    assert await reading == PLAIN[::-1][:5000]
    seen = bench.store.get(view)
    assert seen is not None
    assert not seen.whole
    await filling


@pytest.mark.parametrize("size", [1, 9000, 70_000])
async def test_who_begins_to_wait_for_what_is_on_its_way_gets_it(bench: Bench, size: int) -> None:
    view = bench.layers.add(PLAIN, member(PLAIN, memory_level=4), bench.tiers)
    filling = asyncio.create_task(bench.road.complete(view, at_once=2))
    await until(lambda: bench.tier.sent_bytes > size)
    for offset in (0, 50_000, 350_000):
        assert await bench.read(view, offset, 9000) == PLAIN[offset : offset + 9000]
    await filling
    assert await is_whole(bench, view)


async def test_what_a_broken_connection_had_brought_is_not_fetched_again(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.script = ["broken"]
    await bench.road.ensure(view, Extent(0, 99_000), demand=False)
    (first, *rest) = [asked.extent for asked in bench.tier.asked]
    assert first is not None
    assert rest
    assert all(one is not None and one.offset >= first.length // 2 for one in rest)


async def test_more_fetches_than_buffers_do_not_wait_for_each_other(bench: Bench) -> None:
    await bench.close()
    await bench.open(background_slots=32, window_bytes=64 * 1024)
    views = [bench.layers.add(plain, plain, bench.tiers) for plain in shifted(6)]
    for view in views:  # runs with a chunk that is here are written in parts
        for offset in range(0, len(PLAIN), 60_000):
            await bench.read(view, offset, 1)
    async with asyncio.timeout(30):
        await asyncio.gather(*(bench.road.complete(view, at_once=8) for view in views))
    for view, plain in zip(views, shifted(6), strict=True):
        opened = bench.store.get(view)
        assert opened is not None
        assert opened.complete
        assert opened.path.read_bytes()[: len(plain)] == plain


def shifted(count: int) -> list[bytes]:
    """So many different plain layers."""
    return [PLAIN[n:] + PLAIN[:n] for n in range(count)]


async def test_the_first_window_that_cannot_be_had_ends_all(bench: Bench) -> None:
    await bench.close()
    await bench.open(miss_timeout_s=0.05)
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    bench.tier.always = "unavailable"
    with pytest.raises(UnavailableError, match="503"):
        await bench.road.complete(view, at_once=3)
    await until(lambda: not bench.road.is_working(view))


async def test_no_room_is_said_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise NoSpaceError("no space for chunks")

    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    monkeypatch.setattr(bench.store.space, "reserve", full)
    with pytest.raises(NoSpaceError, match="no space"):
        await bench.road.complete(view, at_once=3)
    await until(lambda: not bench.road.is_working(view))


async def test_a_fill_of_a_view_whose_layers_are_forgotten_ends_at_once(bench: Bench) -> None:
    view = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    assert await bench.read(view, 0, 100) == PLAIN[:100]
    bench.tier.always = "unavailable"
    filling = asyncio.create_task(bench.road.complete(view))
    await until(lambda: len(bench.tier.asked) > 2)
    forgotten = bench.layers.sources.pop(view)
    with pytest.raises(NotFoundError, match="no layer is known"):
        await filling
    bench.tier.always = ""
    bench.layers.sources[view] = forgotten
    assert await bench.read(view, 0, len(PLAIN)) == PLAIN
