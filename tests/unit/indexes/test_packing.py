"""The packed index: what is packed is unpacked, and nothing more than was promised."""

from __future__ import annotations

import random

import pytest
import zstandard

from snapshotter.errors import CorruptError
from snapshotter.indexes.artifact import Content
from snapshotter.indexes.packing import Unpacker, pack
from snapshotter.oci.documents import digest_of

DATA = bytes(300_000) + random.Random(1).randbytes(100_000)
PLAIN = Content(digest_of(DATA), len(DATA))


def _unpacked(packed: bytes, plain: Content = PLAIN, piece: int = 10_000) -> bytes:
    parts: list[bytes] = []
    unpacker = Unpacker(plain, parts.append, "it")
    for at in range(0, len(packed), piece):
        unpacker.feed(packed[at : at + piece])
    unpacker.finish()
    return b"".join(parts)


@pytest.mark.parametrize("piece", [1, 513, 10_000, 1_000_000])
def test_what_is_packed_is_unpacked(piece: int) -> None:
    assert _unpacked(pack(DATA), piece=piece) == DATA


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (pack(DATA)[:-1], "cut"),
        (b"", "cut"),
        (pack(DATA) + b"x", "behind its end"),
        (pack(DATA) + pack(b"more"), "behind its end"),
        (b"no zstd at all", "not zstd"),
        (pack(DATA[:-1]), "not the index"),
        (pack(DATA[:-1] + b"x"), "not the index"),
        (pack(DATA + b"x"), "longer than"),
    ],
)
def test_anything_else_is_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(CorruptError, match=reason):
        _unpacked(packed)


def test_a_bomb_ends_at_the_promised_length() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 * 1024**2))
    taken = 0

    def count(data: bytes) -> None:
        nonlocal taken
        taken += len(data)

    with pytest.raises(CorruptError, match="longer than"):
        Unpacker(PLAIN, count, "it").feed(bomb)
    assert taken <= PLAIN.size_bytes


def test_a_window_that_takes_all_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = stream.compress(DATA) + stream.flush()
    with pytest.raises(CorruptError, match="not zstd"):
        _unpacked(packed)
