"""Windows keep what is reached and nothing else, and points go on in order with what they need."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotter.image import checkpoints
from snapshotter.image.checkpoints import Checkpoints, Passed
from snapshotter.image.gzip import GzipStream, trimmed
from snapshotter.image.stream import PointKind, RestartPoint
from tests.unit.image.layers import index_of, member, members, text


def points_of(blob: bytes, spacing_bytes: int = 16 * 1024) -> list[RestartPoint]:
    stream = GzipStream(spacing_bytes=spacing_bytes, chunk_bytes=4096)
    data, room = memoryview(blob), memoryview(bytearray(1 << 20))
    found = []
    while data:
        consumed, _ = stream.step(data, room)
        data = data[consumed:]
        found += stream.take_points()
    return found


def rest_from(point: RestartPoint, blob: bytes, length: int) -> bytes:
    stream = GzipStream(at=point)
    out = bytearray(length)
    _, produced = stream.step(memoryview(blob)[point.in_offset :], memoryview(out))
    return bytes(out[:produced])


@given(
    seed=st.integers(0, 1 << 32),
    level=st.integers(0, 9),
    memory_level=st.integers(1, 9),
    length=st.integers(40_000, 400_000),
)
@settings(max_examples=40, deadline=None)
def test_what_follows_a_trimmed_window_is_right(
    seed: int, level: int, memory_level: int, length: int
) -> None:
    plain = text(length, seed)
    blob = member(plain, level, memory_level)
    for point in points_of(blob):
        shorter = trimmed(point, blob[point.in_offset :], is_all=True)
        assert len(shorter.window) == len(point.window)
        assert rest_from(shorter, blob, length) == plain[point.out_offset :]


def test_a_window_that_hardly_anything_reaches_into_is_hardly_kept() -> None:
    chance = random.Random(7)
    plain = b"".join(chance.randbytes(40_000) + text(20_000, n) for n in range(8))
    blob = member(plain, memory_level=4)
    inside = [point for point in points_of(blob) if point.kind is PointKind.BLOCK]
    shorter = [trimmed(point, blob[point.in_offset :], is_all=True) for point in inside]
    kept = [len(point.window) - point.window.count(0) for point in shorter]
    assert len(kept) > 5
    assert sum(kept) < sum(len(point.window) for point in inside) / 4
    packed = [len(zlib.compress(point.window)) for point in shorter]
    assert sum(packed) < sum(len(zlib.compress(point.window)) for point in inside) / 3


def test_a_window_stays_whole_where_too_little_or_nonsense_follows() -> None:
    blob = member(text(200_000), memory_level=4)
    point = points_of(blob)[1]
    few = blob[point.in_offset : point.in_offset + 500]
    for behind in (b"", few, b"\xff" * 100_000):
        assert trimmed(point, behind, is_all=False) == point
    last = replace(point, kind=PointKind.MEMBER, window=b"")
    assert trimmed(last, few, is_all=True) is last


def fed(blob: bytes, piece_bytes: int) -> list[Passed]:
    """What goes on of the points of ``blob``, which comes in pieces; in their order."""
    found: list[RestartPoint] = []
    gone: list[Passed] = []
    waiting = Checkpoints()
    stream = GzipStream(spacing_bytes=16 * 1024, chunk_bytes=4096)
    room = memoryview(bytearray(4 << 20))
    for at in range(0, len(blob), piece_bytes):
        data = memoryview(blob)[at : at + piece_bytes]
        assert stream.step(data, room)[0] == len(data)
        for point in stream.take_points():
            found.append(point)
            waiting.add(point)
        gone += waiting.fed(data, stream.out_offset)
    gone += waiting.end()
    assert [point for point, _, _ in gone] == found
    return gone


@pytest.mark.parametrize("piece_bytes", [1, 100, 4096, 1 << 20])
def test_points_go_on_in_order_each_with_what_follows_it(piece_bytes: int) -> None:
    plain = text(150_000)
    for blob in (member(plain, memory_level=4), members(plain, 30_000)):
        gone = fed(blob, piece_bytes)
        assert len(gone) > 1
        for point, behind, is_all in gone:
            if not point.window:
                continue
            assert behind == blob[point.in_offset : point.in_offset + len(behind)]
            shorter = trimmed(point, behind, is_all=is_all)
            assert shorter.window != point.window
            assert rest_from(shorter, blob, 150_000) == plain[point.out_offset :]


def test_what_is_kept_for_points_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MOST_KEPT_BYTES", 1000)
    gone: list[int] = []
    waiting = Checkpoints()
    waiting.add(RestartPoint(10, 500, PointKind.BLOCK, 0, b"window"))
    for _ in range(11):  # a stream of empty blocks: nothing comes out
        gone += [len(one.behind) for one in waiting.fed(memoryview(bytes(100)), 500)]
    assert gone == [1090]


def test_a_layer_is_indexed_densely_and_its_windows_are_small(tmp_path: Path) -> None:
    plain = text(400_000, 3)
    index = index_of(member(plain, memory_level=4), plain, tmp_path)
    windows = Path(index.where).with_suffix(".win").stat().st_size
    points = [index.checkpoint(number) for number in range(index.checkpoint_count)]
    whole = sum(len(zlib.compress(plain[max(0, p.out_offset - 32768) : p.out_offset], 3))
                for p in points)  # fmt: skip
    assert len(points) > 8
    assert windows < whole
