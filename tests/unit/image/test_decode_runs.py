"""Runs: whole chunks where they are written from, the same as come out one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from snapshotter.errors import CorruptError
from snapshotter.image.decode import Decoder, Run, Span, plan
from snapshotter.image.index import LayerIndex
from tests.unit.image.layers import index_of, member
from tests.unit.image.test_decode import FORMS, PLAIN


@pytest.fixture(params=FORMS, scope="module")
def layer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LayerIndex, bytes]:
    blob = FORMS[request.param](PLAIN)
    return index_of(blob, PLAIN, tmp_path_factory.mktemp("index")), blob


class Filling:
    """Decodes a span into runs of ``chunks``, and keeps what came out by its number."""

    def __init__(self, index: LayerIndex, span: Span, chunks: int) -> None:
        self.decoder = Decoder(index, span)
        self.seen: dict[int, bytes] = {}
        self._memory = bytearray(chunks * index.chunk_bytes)
        self._run = Run(memoryview(self._memory), index.chunk_bytes)

    def give(self, piece: bytes) -> None:
        left = memoryview(piece)
        while True:
            left = self.decoder.fill(left, self._run)
            if not self._run.is_full:
                return
            self.end_run()

    def end_run(self) -> None:
        """As one that is written: the next begins with what was left over."""
        run, index = self._run, self.decoder.index
        self.decoder.take_back(run)
        at = 0
        for number in range(run.first, run.first + run.count):
            length = index.chunk_extent(number).length
            assert number not in self.seen
            self.seen[number] = bytes(run.memory[at : at + length])
            at += length
        self._memory[:] = bytes(len(self._memory))
        self._run = Run(memoryview(self._memory), index.chunk_bytes)


def is_right(index: LayerIndex, seen: dict[int, bytes]) -> bool:
    extents = {number: index.chunk_extent(number) for number in seen}
    return all(PLAIN[extents[n].offset : extents[n].end] == data for n, data in seen.items())


@pytest.mark.parametrize("chunks", [1, 3, 16])
def test_whatever_the_pieces_and_the_runs_the_chunks_are_the_same(
    layer: tuple[LayerIndex, bytes], chunks: int
) -> None:
    index, blob = layer
    chance = random.Random(chunks)
    for _ in range(4):
        first = chance.randrange(index.chunk_count)
        last = chance.randrange(first, index.chunk_count)
        for span in plan(index, range(first, last + 1)):
            filling = Filling(index, span, chunks)
            at = span.in_offset
            while at < span.in_end:
                end = min(span.in_end, at + chance.choice((13, 700, 50_000)))
                filling.give(blob[at:end])
                if chance.random() < 0.2:
                    filling.end_run()
                at = end
            filling.end_run()
            assert filling.decoder.done
            assert list(filling.seen) == list(range(span.first_chunk, span.last_chunk + 1))
            assert is_right(index, filling.seen)


def test_one_by_one_and_in_runs_may_follow_each_other(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    (span,) = plan(index, range(index.chunk_count))
    filling = Filling(index, span, 4)
    for turn, at in enumerate(range(0, len(blob), 10_001)):
        piece = blob[at : at + 10_001]
        if turn % 2:
            filling.give(piece)
            filling.end_run()
        else:
            filling.seen.update(filling.decoder.feed(piece))
    assert sorted(filling.seen) == list(range(index.chunk_count))
    assert is_right(index, filling.seen)


def test_a_span_that_gives_less_than_it_should_is_corrupt(tmp_path: Path) -> None:
    blob = member(PLAIN, memory_level=4)
    index = index_of(blob, PLAIN, tmp_path)
    (span,) = plan(index, [3])
    filling = Filling(index, span, 4)
    with pytest.raises(CorruptError, match=r"do not decode|should be complete"):
        filling.give(b"\xff" * span.length_bytes)
    assert filling.decoder.failed
