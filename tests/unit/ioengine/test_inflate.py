"""The Python face of the inflate core: both decoders give the same from every restart point."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest

from ioengine.inflate import LOOKAHEAD_BYTES, InflateError, InflatePoint, Inflater

CHUNK_BYTES = 4096


def plain_bytes(length: int) -> bytes:
    chance = random.Random(3)
    words = [chance.randbytes(chance.randrange(2, 30)) for _ in range(300)]
    return b"".join(chance.choice(words) for _ in range(length // 8))[:length]


def member(plain: bytes) -> bytes:
    deflater = zlib.compressobj(6, zlib.DEFLATED, 31, 1)
    return deflater.compress(plain) + deflater.flush()


PLAIN = plain_bytes(200_000)
SECOND = 96_000
"""Where the second member with something in it begins."""
STORED = member(PLAIN[:SECOND]) + member(b"") + member(PLAIN[SECOND:])


def inflated(inflater: Inflater, data: bytes, room: int = 1 << 20) -> bytes:
    out, view, left = bytearray(room), bytearray(), memoryview(data)
    while True:
        consumed, produced = inflater.step(left, memoryview(out))
        view += out[:produced]
        left = left[consumed:]
        if not left and produced < room:
            return bytes(view)


@pytest.mark.parametrize("with_isal", [False, True])
def test_points_and_ends_are_recorded_and_in_order(with_isal: bool) -> None:
    inflater = Inflater(spacing_bytes=20_000, chunk_bytes=CHUNK_BYTES, with_isal=with_isal)
    assert inflated(inflater, STORED, room=777) == PLAIN
    assert inflater.at_end()
    assert (inflater.in_offset, inflater.out_offset) == (len(STORED), len(PLAIN))
    assert len(inflater.ends) == len(PLAIN) // CHUNK_BYTES
    assert inflater.ends == sorted(inflater.ends)
    assert len(inflater.points) >= 7
    for point in inflater.points:
        begin = 0 if point.out_offset <= SECOND else SECOND  # no member reaches into another
        window = PLAIN[begin : point.out_offset][-32768:]
        assert point.window == (b"" if point.member else window)


@pytest.mark.parametrize("with_isal", [False, True])
def test_a_member_is_a_point_without_a_window_where_one_is_due(with_isal: bool) -> None:
    inflater = Inflater(spacing_bytes=SECOND, chunk_bytes=CHUNK_BYTES, with_isal=with_isal)
    assert inflated(inflater, STORED) == PLAIN
    first = inflater.points[0]
    assert (first.member, first.window, first.out_offset) == (True, b"", SECOND)
    later = Inflater(at=first, with_isal=with_isal)
    assert inflated(later, STORED[first.in_offset :]) == PLAIN[SECOND:]


@pytest.mark.parametrize("made_by_isal", [False, True])
@pytest.mark.parametrize("with_isal", [False, True])
def test_from_every_point_each_chunk_needs_no_more_than_its_end(
    with_isal: bool, made_by_isal: bool
) -> None:
    first = Inflater(spacing_bytes=20_000, chunk_bytes=CHUNK_BYTES, with_isal=made_by_isal)
    inflated(first, STORED)
    for point in first.points:
        chunk = -(-point.out_offset // CHUNK_BYTES)
        for number in (chunk, chunk + 3):
            if number >= len(first.ends):
                continue
            end = first.ends[number] + (LOOKAHEAD_BYTES if with_isal else 0)
            again = Inflater(at=point, with_isal=with_isal)
            out = bytearray((number + 1) * CHUNK_BYTES - point.out_offset)
            _, produced = again.step(memoryview(STORED[point.in_offset : end]), memoryview(out))
            assert produced == len(out)
            assert out == PLAIN[point.out_offset : point.out_offset + len(out)]


@pytest.mark.parametrize("with_isal", [False, True])
def test_members_behind_a_resumed_one_are_verified(with_isal: bool) -> None:
    first = Inflater(spacing_bytes=20_000, with_isal=with_isal)
    inflated(first, STORED)
    for point in (InflatePoint(0, 0, 0, b"", True), first.points[1]):
        whole = Inflater(at=point, with_isal=with_isal)
        assert inflated(whole, STORED[point.in_offset :]) == PLAIN[point.out_offset :]
        assert whole.at_end()
        broken = Inflater(at=point, with_isal=with_isal)
        data = bytearray(STORED[point.in_offset :])
        data[-8] ^= 1
        with pytest.raises(InflateError, match="incorrect data check"):
            inflated(broken, bytes(data))


@pytest.mark.parametrize("with_isal", [False, True])
def test_bytes_of_another_file_are_a_fault_that_stays(with_isal: bool) -> None:
    inflater = Inflater(at=InflatePoint(0, 0, 0, b"", True), with_isal=with_isal)
    for _ in range(2):
        with pytest.raises(InflateError):
            inflated(inflater, b"no gzip, " * 20)
    with pytest.raises(OSError, match="starting to inflate"):
        Inflater(at=InflatePoint(0, 0, 9, b"", False), with_isal=with_isal)


HEADER = (
    b"\x1f\x8b\x08\x1c"
    + bytes(4)
    + b"\0\xff"  # an extra field, a name, a comment
    + (700).to_bytes(2, "little")
    + bytes(700)
    + b"n" * 300
    + b"\0"
    + b"c" * 300
    + b"\0"
)


@pytest.mark.parametrize("with_isal", [False, True])
@pytest.mark.parametrize("piece", [1, 13, 1 << 20])
def test_a_long_header_may_come_in_any_pieces(piece: int, with_isal: bool) -> None:
    plain = member(PLAIN)
    stored = HEADER + plain[10:]
    inflater = Inflater(at=InflatePoint(0, 0, 0, b"", True), with_isal=with_isal)
    begin = len(HEADER) + 100
    pieces = [stored[at : min(at + piece, begin)] for at in range(0, begin, piece)]
    out = b"".join(inflated(inflater, part, 1000) for part in [*pieces, stored[begin:]])
    assert out == PLAIN
    assert inflater.at_end()


UNLIKE: dict[str, tuple[bytes, int]] = {
    "zeros": (bytes(30_000_000), zlib.Z_DEFAULT_STRATEGY),
    "codes that every decoder knows": (PLAIN * 80, zlib.Z_FIXED),
    "no matches": (PLAIN * 40, zlib.Z_HUFFMAN_ONLY),
}


@pytest.mark.parametrize("with_isal", [False, True])
@pytest.mark.parametrize("kind", UNLIKE)
def test_decoding_can_begin_often_enough_whatever_the_blocks_are_like(
    kind: str, with_isal: bool
) -> None:
    plain, strategy = UNLIKE[kind]
    deflater = zlib.compressobj(6, zlib.DEFLATED, 31, 8, strategy)
    stored = deflater.compress(plain) + deflater.flush()
    inflater = Inflater(spacing_bytes=1 << 20, chunk_bytes=1 << 16, with_isal=with_isal)
    assert inflated(inflater, stored) == plain
    places = [0, *(point.out_offset for point in inflater.points), len(plain)]
    assert max(b - a for a, b in itertools.pairwise(places)) < 8 << 20
    for point in inflater.points[::9]:
        rest = inflated(Inflater(at=point), stored[point.in_offset :])
        assert rest == plain[point.out_offset :]
