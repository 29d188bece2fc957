"""A blob read over several connections comes out as one stream: whole, in order, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import (
    BusyError,
    CorruptError,
    EmberError,
    RangeUnsupportedError,
    UnauthorizedError,
    UnavailableError,
)
from snapshotter.fetch import spread
from snapshotter.fetch.pace import Origins
from snapshotter.fetch.spread import SpreadStreams
from tests.fakes.short_clock import ShortClock
from tests.unit.fetch.conftest import until

PART = 1000
DATA = bytes(number * 7 % 251 for number in range(20 * PART + 123))
BLOB = BlobRef("registry.test/app", Digest("sha256", "5" * 64), len(DATA))

Fault = Callable[[int, Extent | None], EmberError | None]


class Blobs:
    """One blob; ``fault`` says what breaks a reading after half of it, by its number and range."""

    def __init__(self, fault: Fault = lambda number, extent: None) -> None:
        self.fault = fault
        self.asked: list[Extent | None] = []
        self.open = self.most_open = 0
        self.suspected = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, blob: BlobRef, extent: Extent) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._give(extent)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._give(None)) as pieces:
            async for piece in pieces:
                yield piece

    def suspect(self, blob: BlobRef) -> None:
        self.suspected += 1

    async def _give(self, extent: Extent | None) -> AsyncGenerator[bytes, None]:
        fault = self.fault(len(self.asked), extent)
        self.asked.append(extent)
        whole = extent or Extent(0, len(DATA))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0)
            if isinstance(fault, RangeUnsupportedError | UnauthorizedError):
                raise fault
            for at in range(whole.offset, whole.end, 300):
                if fault is not None and at >= whole.offset + whole.length // 2:
                    raise fault
                if at > 0:
                    await self.gate.wait()
                yield DATA[at : min(at + 300, whole.end)]
                await asyncio.sleep(0)
        finally:
            self.open -= 1


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "PART_BYTES", PART)


def streams(blobs: Blobs, most: int = 16) -> SpreadStreams:
    clock = ShortClock()
    return SpreadStreams(blobs, Origins(clock, most=most), clock)


async def all_of(of: SpreadStreams, blob: BlobRef = BLOB) -> bytes:
    async with aclosing(of.stream(blob)) as pieces:
        return b"".join([piece async for piece in pieces])


async def test_ranges_side_by_side_come_out_in_order() -> None:
    blobs = Blobs()
    assert await all_of(streams(blobs)) == DATA
    assert 1 < blobs.most_open <= spread.MOST_PARTS
    assert sorted(extent.offset for extent in blobs.asked if extent) == list(range(0, 20001, PART))
    assert blobs.open == 0


async def test_one_connection_is_enough_where_no_more_are_allowed() -> None:
    blobs = Blobs()
    assert await all_of(streams(blobs, most=1)) == DATA
    assert blobs.most_open == 1


async def test_a_small_blob_is_one_request() -> None:
    blobs = Blobs()
    small = BlobRef("registry.test/app", Digest("sha256", "6" * 64), 2 * PART - 1)
    assert await all_of(streams(blobs), small) == DATA
    assert blobs.asked == [None]


async def test_no_second_range_is_asked_for_before_the_first_has_brought_anything() -> None:
    blobs = Blobs(lambda number, extent: UnauthorizedError("no"))
    with pytest.raises(UnauthorizedError):
        await all_of(streams(blobs))
    assert len(blobs.asked) == 1


async def test_what_nobody_reads_is_bounded() -> None:
    blobs = Blobs()
    async with aclosing(streams(blobs).stream(BLOB)) as pieces:
        assert await anext(pieces) == DATA[:300]
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(blobs.asked) <= spread.MOST_PARTS
    assert blobs.open == 0


async def test_a_range_that_breaks_is_taken_up_where_it_broke() -> None:
    def every_third(number: int, extent: Extent | None) -> EmberError | None:
        return UnavailableError("reset") if number % 3 == 1 else None

    blobs = Blobs(every_third)
    assert await all_of(streams(blobs)) == DATA
    asked = [extent for extent in blobs.asked if extent]
    assert len(asked) > 21
    assert sum(extent.length for extent in asked) < 1.5 * len(DATA)


async def test_a_registry_that_breaks_everything_is_given_up() -> None:
    blobs = Blobs(lambda number, extent: UnavailableError("reset") if number > 2 else None)
    blobs.fault = lambda number, extent: None if number < 2 else BusyError("no", retry_after_s=90)
    with pytest.raises(BusyError):
        await all_of(streams(blobs))
    assert blobs.open == 0


@pytest.mark.parametrize("number", [0, 3])
async def test_without_ranges_it_comes_whole_and_nothing_twice(number: int) -> None:
    blobs = Blobs(
        lambda asked, extent: RangeUnsupportedError("none") if extent and asked >= number else None
    )
    assert await all_of(streams(blobs)) == DATA
    assert blobs.asked[-1] is None
    assert blobs.open == 0


async def test_a_lie_ends_the_stream_and_all_that_is_under_way() -> None:
    blobs = Blobs(lambda number, extent: CorruptError("lies") if number == 2 else None)
    of = streams(blobs)
    with pytest.raises(CorruptError):
        await all_of(of)
    assert blobs.open == 0
    of.suspect(BLOB)
    assert blobs.suspected == 1


async def test_who_stops_reading_leaves_nothing_running() -> None:
    blobs = Blobs()
    blobs.gate.clear()
    reading = asyncio.create_task(all_of(streams(blobs)))
    await until(lambda: blobs.open > 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert blobs.open == 0
