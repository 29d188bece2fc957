"""Runs of chunks in a lent buffer: written past the page cache, whatever is here of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from ioengine.buffers import Buffer
from ioengine.threads import ThreadEngine
from snapshotter.chunks.view import View
from snapshotter.errors import CorruptError
from tests.unit.chunks.conftest import CHUNK, VIEW, Content, Stores

COUNT = 12
CONTENT = Content(COUNT * CHUNK - 1000)


@dataclass
class Watched:
    """Notes what the engine of a test writes."""

    engine: ThreadEngine
    written: list[tuple[int, int]]

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    async def write(
        self, fd: int, buffer: Buffer, file_offset: int, length: int, *, sync: bool = False
    ) -> int:
        self.written.append((file_offset, length))
        return await self.engine.write(fd, buffer, file_offset, length, sync=sync)


@pytest.fixture
async def watched(stores: Stores, engine: ThreadEngine) -> Watched:
    watched = Watched(engine, [])
    stores.engine = watched  # type: ignore[assignment]
    return watched


async def lay_out(view: View, first: int, count: int, data: bytes) -> int:
    async with view.lend() as buffer:
        buffer.memory[:] = b"\xff" * len(buffer.memory)
        buffer.memory[: len(data)] = data
        return await view.write_laid_out(first, count, buffer)


@pytest.mark.parametrize("seed", range(8))
async def test_what_is_here_already_is_not_written_again_and_the_rest_is_past_the_cache(
    stores: Stores, watched: Watched, seed: int
) -> None:
    here = set(random.Random(seed).sample(range(COUNT), seed))
    store = await stores.start()
    view = await store.open(VIEW, len(CONTENT.data), CONTENT.digest)
    for number in here:
        view.put(number, CONTENT.chunk(number))
    assert await lay_out(view, 0, COUNT, CONTENT.data) == COUNT - len(here)
    assert view.whole
    assert view.path.read_bytes()[: len(CONTENT.data)] == CONTENT.data
    direct = {
        n for at, length in watched.written for n in range(at // CHUNK, (at + length) // CHUNK)
    }
    assert direct == set(range(COUNT)) - here
    await store.close()


async def test_a_wrong_chunk_keeps_those_before_it_and_nothing_behind(
    stores: Stores, watched: Watched
) -> None:
    store = await stores.start()
    view = await store.open(VIEW, len(CONTENT.data), CONTENT.digest)
    view.put(3, CONTENT.chunk(3))
    wrong = bytearray(CONTENT.data)
    wrong[7 * CHUNK] ^= 1
    with pytest.raises(CorruptError):
        await lay_out(view, 0, COUNT, bytes(wrong))
    assert [n for n in range(COUNT) if view.is_readable(n)] == [0, 1, 2, 3]
    assert await lay_out(view, 4, COUNT - 4, CONTENT.data[4 * CHUNK :]) == COUNT - 4
    assert view.path.read_bytes()[: len(CONTENT.data)] == CONTENT.data
    await store.close()
