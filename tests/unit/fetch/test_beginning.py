"""Reading ahead of a decoder that waits for its window: in order, and never left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from snapshotter.errors import UnavailableError
from snapshotter.fetch.beginning import Ahead
from tests.unit.fetch.conftest import until


class Source:
    """Gives numbered pieces of ten bytes, and then fails if it is told to."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.given = 0
        self.closed = False

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            while self.given < self.count:
                await asyncio.sleep(0)
                self.given += 1
                yield b"%010d" % self.given
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def taken(ahead: Ahead) -> list[int]:
    async with aclosing(ahead.pieces()) as pieces:
        return [int(piece) async for piece in pieces]


@pytest.mark.parametrize("count", [0, 1, 3, 50])
async def test_all_comes_in_order_however_far_it_was_read(count: int) -> None:
    source = Source(count)
    ahead = Ahead(source.pieces())
    await until(lambda: source.given >= min(count, 2))
    assert await taken(ahead) == list(range(1, count + 1))
    assert source.closed


async def test_a_reading_that_nobody_takes_is_stopped() -> None:
    source = Source(1 << 30)
    ahead = Ahead(source.pieces())
    await until(lambda: source.given == 3)
    await ahead.close()
    await ahead.close()
    assert source.closed


async def test_an_error_comes_behind_what_came_before_it() -> None:
    source = Source(5, UnavailableError("reset"))
    ahead = Ahead(source.pieces())
    await until(lambda: source.closed)
    got = []
    with pytest.raises(UnavailableError, match="reset"):
        async with aclosing(ahead.pieces()) as pieces:
            async for piece in pieces:
                got += [int(piece)]
    assert got == [1, 2, 3, 4, 5]


async def test_who_stops_taking_stops_the_reading() -> None:
    source = Source(1000)
    async with aclosing(Ahead(source.pieces()).pieces()) as pieces:
        async for piece in pieces:
            if int(piece) == 7:
                break
    assert source.closed
    assert source.given < 1000
