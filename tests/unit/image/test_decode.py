"""Every chunk comes out of the range that the plan names for it, and of no more than that."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ioengine.inflate import LOOKAHEAD_BYTES
from snapshotter.errors import CorruptError, InvalidArgumentError, NotFoundError, RefusedError
from snapshotter.image.decode import Decoder, DecoderPool, Span, plan
from snapshotter.image.index import LayerIndex
from tests.unit.image.layers import (
    SMALL,
    View,
    frame,
    frames,
    index_of,
    member,
    members,
    skippable,
    text,
)

PLAIN = text(600_001)

FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda plain: plain,
    "gzip": member,
    "gzip with short blocks": lambda plain: member(plain, memory_level=4),
    "gzip stored": lambda plain: member(plain, level=0),
    "gzip fast": lambda plain: member(plain, level=1, memory_level=4),
    "gzip members": lambda plain: members(plain, 70_000),
    "gzip tiny members": lambda plain: members(plain, 601),
    "gzip padded": lambda plain: member(plain, memory_level=4) + b"\0" * 9000,
    "gzip empty members": lambda plain: member(b"") + members(plain, 100_000) + member(b""),
    "zstd": frame,
    "zstd frames": lambda plain: frames(plain, 50_000),
    "zstd tiny frames": lambda plain: frames(plain, 777),
    "zstd with skippable frames": lambda plain: (
        skippable(b"x" * 70_000)
        + frames(plain[:300_000], 90_000)
        + skippable(b"", 15)
        + frame(b"")
        + frames(plain[300_000:], 90_000)
        + skippable(b"end", 7)
    ),
}


@pytest.fixture(params=FORMS, scope="module")
def layer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LayerIndex, bytes]:
    blob = FORMS[request.param](PLAIN)
    return index_of(blob, PLAIN, tmp_path_factory.mktemp("index")), blob


def chunk_of(index: LayerIndex, number: int, plain: bytes = PLAIN) -> bytes:
    extent = index.chunk_extent(number)
    return plain[extent.offset : extent.end]


def decoded(index: LayerIndex, blob: bytes, span: Span, piece_bytes: int = 1 << 20) -> list[int]:
    """Decode a span, check what comes out, and return the chunk numbers."""
    decoder = Decoder(index, span)
    numbers = []
    for at in range(span.in_offset, span.in_end, piece_bytes):
        for number, data in decoder.feed(blob[at : min(at + piece_bytes, span.in_end)]):
            assert data == chunk_of(index, number)
            assert blake3(data).digest() == index.chunk_digest(number)
            numbers.append(number)
    assert decoder.done
    return numbers


def test_the_view_is_the_plain_bytes(tmp_path: Path) -> None:
    for name, form in FORMS.items():
        view = View()
        index = index_of(form(PLAIN), PLAIN, tmp_path, sink=view)
        assert bytes(view.data) == PLAIN, name
        assert index.view_bytes == len(PLAIN)


def test_every_chunk_alone_comes_out_of_its_span(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    for number in range(index.chunk_count):
        (span,) = plan(index, [number])
        assert span.first_chunk <= span.wanted_chunk == number <= span.last_chunk
        assert decoded(index, blob, span) == list(range(span.first_chunk, span.last_chunk + 1))


def test_a_span_fed_in_small_pieces_gives_the_same(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    number = index.chunk_count // 2
    (span,) = plan(index, [number, number + 1])
    assert decoded(index, blob, span, piece_bytes=97)[-1] == span.last_chunk >= number + 1


def test_all_chunks_are_one_span_over_the_whole_blob(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    (span,) = plan(index, range(index.chunk_count))
    assert span.in_offset == 0
    assert decoded(index, blob, span) == list(range(index.chunk_count))


def test_limited_spans_together_give_all_chunks(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    spans = plan(index, range(index.chunk_count), limit_bytes=64 * 1024)
    numbers = [number for span in spans for number in decoded(index, blob, span)]
    assert sorted(set(numbers)) == list(range(index.chunk_count))
    if index.longest_run_bytes < 40_000:
        assert len(spans) > 2
        assert max(span.length_bytes for span in spans) < 200 * 1024


def test_a_decoder_goes_on_where_it_stopped(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    pool = DecoderPool()
    fetched = 0
    got: dict[int, bytes] = {}
    for number in range(index.chunk_count):
        if number in got:
            continue
        (span,) = plan(index, [number])
        decoder = pool.take(index, span)
        fetched += decoder.span.length_bytes
        data = blob[decoder.span.in_offset : decoder.span.in_end]
        got |= decoder.feed(data)
        assert got[number] == chunk_of(index, number)
        pool.give(decoder)
    assert fetched <= index.blob_bytes + LOOKAHEAD_BYTES * index.chunk_count


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_set_of_chunks_in_any_order_through_the_pool(
    data: st.DataObject, layer: tuple[LayerIndex, bytes]
) -> None:
    index, blob = layer
    pool = DecoderPool(max_decoders=data.draw(st.integers(1, 3)))
    wanted = st.lists(st.integers(0, index.chunk_count - 1), min_size=1, max_size=5)
    for chunks in data.draw(st.lists(wanted, max_size=6)):
        got: dict[int, bytes] = {}
        for span in plan(index, chunks, gap_bytes=data.draw(st.sampled_from([0, 4096]))):
            decoder = pool.take(index, span)
            assert decoder.span.in_offset >= span.in_offset
            got |= decoder.feed(blob[decoder.span.in_offset : decoder.span.in_end])
            assert decoder.done
            pool.give(decoder)
        assert set(chunks) <= set(got)
        assert all(chunk == chunk_of(index, number) for number, chunk in got.items())


def test_wrong_bytes_never_pass_for_a_chunk(layer: tuple[LayerIndex, bytes]) -> None:
    index, blob = layer
    chance = random.Random(7)
    for _ in range(60):
        (span,) = plan(index, [chance.randrange(index.chunk_count)])
        data = bytearray(blob[span.in_offset : span.in_end])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        decoder = Decoder(index, span)
        try:
            chunks = decoder.feed(data)
        except CorruptError:
            assert decoder.failed
            continue
        for number, chunk in chunks:
            right = blake3(chunk).digest() == index.chunk_digest(number)
            assert right == (chunk == chunk_of(index, number))
            assert number <= span.last_chunk


def test_a_range_that_is_too_short_inside_is_noticed(tmp_path: Path) -> None:
    blob = member(PLAIN, memory_level=4)
    index = index_of(blob, PLAIN, tmp_path)
    other = member(b"\0" * 100, level=0)
    decoder = Decoder(index, Span(0, len(other), 0, 0, 0, 0))
    with pytest.raises(CorruptError, match="do not decode"):
        decoder.feed(other + other)


def test_neighbours_are_merged_and_far_chunks_are_not(tmp_path: Path) -> None:
    index = index_of(member(PLAIN, memory_level=4), PLAIN, tmp_path)
    last = index.chunk_count - 1
    spans = plan(index, [last, 3, 4, 5, 3])
    assert [(span.wanted_chunk, span.last_chunk) for span in spans] == [(3, 5), (last, last)]
    (joined,) = plan(index, [3, last], gap_bytes=1 << 30)
    assert (joined.wanted_chunk, joined.last_chunk) == (3, last)


def test_a_kept_decoder_is_not_taken_for_chunks_behind_it(tmp_path: Path) -> None:
    blob = member(PLAIN, memory_level=4)
    index = index_of(blob, PLAIN, tmp_path)
    pool = DecoderPool()
    (span,) = plan(index, [20])
    decoder = pool.take(index, span)
    decoder.feed(blob[span.in_offset : span.in_end])
    pool.give(decoder)
    (before,) = plan(index, [20])
    assert pool.take(index, before) is not decoder
    with pytest.raises(InvalidArgumentError, match="cannot go back"):
        decoder.extend(before)
    (after,) = plan(index, [21])
    assert pool.take(index, after) is decoder
    assert len(pool) == 0


def test_the_pool_is_bounded_by_number_and_by_memory(tmp_path: Path) -> None:
    blob = frames(PLAIN, 50_000)
    index = index_of(blob, PLAIN, tmp_path)
    for pool in (DecoderPool(max_decoders=2), DecoderPool(max_bytes=600 * 1024)):
        for number in range(0, 60, 10):
            (span,) = plan(index, [number])
            decoder = Decoder(index, span)
            decoder.feed(blob[span.in_offset : span.in_end])
            pool.give(decoder)
        assert 1 <= len(pool) <= 2
        pool.discard(index.layer)
        assert len(pool) == 0


def test_chunks_come_out_one_by_one(tmp_path: Path) -> None:
    zeros = bytes(4 << 20)
    for blob in (member(zeros), frame(zeros)):
        index = index_of(blob, zeros, tmp_path)
        (span,) = plan(index, range(index.chunk_count))
        decoder = Decoder(index, span)
        numbers = []
        for number, chunk in decoder.chunks(blob):
            assert chunk == bytes(index.chunk_bytes)
            assert decoder.next_chunk == number + 1
            numbers.append(number)
        assert numbers == list(range(index.chunk_count))


def test_right_chunks_before_the_wrong_byte_still_come_out(tmp_path: Path) -> None:
    blob = members(PLAIN, 70_000)
    index = index_of(blob, PLAIN, tmp_path)
    (span,) = plan(index, range(index.chunk_count))
    broken = bytearray(blob)
    broken[len(blob) // 2] ^= 255
    decoder = Decoder(index, span)
    right = 0
    with pytest.raises(CorruptError):
        for number, chunk in decoder.chunks(broken):
            right += blake3(chunk).digest() == index.chunk_digest(number)
    assert decoder.failed
    assert right >= index.chunk_count // 3


def test_a_pool_serves_many_threads(tmp_path: Path) -> None:
    blob = member(PLAIN, memory_level=4)
    index = index_of(blob, PLAIN, tmp_path)
    pool = DecoderPool(max_decoders=3)

    def read_some(seed: int) -> int:
        chance = random.Random(seed)
        read = 0
        for _ in range(60):
            number = chance.randrange(index.chunk_count)
            (span,) = plan(index, [number])
            decoder = pool.take(index, span)
            chunks = dict(decoder.feed(blob[decoder.span.in_offset : decoder.span.in_end]))
            pool.give(decoder)
            read += chunks[number] == chunk_of(index, number)
        return read

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read_some, range(4))) == [60] * 4
    assert len(pool) <= 3


def test_a_failed_or_finished_decoder_is_not_kept(tmp_path: Path) -> None:
    blob = member(PLAIN)
    index = index_of(blob, PLAIN, tmp_path)
    pool = DecoderPool()
    (span,) = plan(index, [index.chunk_count - 1])
    decoder = Decoder(index, span)
    decoder.feed(blob[span.in_offset : span.in_end])
    pool.give(decoder)
    failed = Decoder(index, plan(index, [0])[0])
    with pytest.raises(CorruptError):
        failed.feed(b"\x1f\x8b\x08\xff" + bytes(100))
    pool.give(failed)
    assert len(pool) == 0


def test_a_missing_or_torn_windows_file_is_named(tmp_path: Path) -> None:
    index = index_of(member(PLAIN, memory_level=4), PLAIN, tmp_path)
    (span,) = plan(index, [index.chunk_count - 1])
    (windows,) = tmp_path.glob("*.win")
    whole = windows.read_bytes()
    windows.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RefusedError, match=r"window of checkpoint \d+ .* torn"):
        Decoder(index, span).open()
    windows.unlink()
    with pytest.raises(NotFoundError, match="indexed again"):
        Decoder(index, span).open()
    Decoder(index, plan(index, [0])[0]).open()


def test_a_single_frame_is_known_not_to_be_random_access(tmp_path: Path) -> None:
    plain = b"".join(bytes([n % 251]) * 4096 for n in range(2304))
    assert not index_of(frame(plain), plain, tmp_path, limits=SMALL).random_access
    assert index_of(frames(plain, 1 << 20), plain, tmp_path, limits=SMALL).random_access
    assert index_of(plain, plain, tmp_path, limits=SMALL).random_access
