"""zstd layers of many frames are read at random: what tools make, frame by frame, and no more.

The forms are those of containers/storage (zstd:chunked), of zstd's contrib/seekable_format, and of
pzstd, which tells each frame's length in a skippable frame before it.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

import pytest

from tests.unit.fetch.conftest import Bench, until
from tests.unit.image.layers import SMALL, frame, skippable, tar, text

FILES = [(f"usr/lib/f{n}", text(random.Random(n).randrange(100, 40_000), n)) for n in range(40)]
PLAIN = tar(FILES)
PART = 17_000


def cut(plain: bytes, size: int) -> list[bytes]:
    return [plain[at : at + size] for at in range(0, len(plain), size)]


def chunked(plain: bytes) -> bytes:
    """A frame for the headers before each file and for every part of its content; then the list of
    all files, and a footer that says where that is, both in skippable frames."""
    parts, entries, at = list[bytes](), list[dict[str, object]](), 0
    for name, content in FILES:
        begin = plain.index(content, at)
        parts += [frame(plain[at:begin]), *(frame(part) for part in cut(content, PART))]
        entries.append({"type": "reg", "name": name, "offset": sum(map(len, parts))})
        at = begin + len(content)
    parts.append(frame(plain[at:]))
    listed = frame(json.dumps({"version": 1, "entries": entries}).encode())
    where = sum(map(len, parts)) + 8
    footer = struct.pack("<QQQQ", where, len(listed), 0, 1) + b"GNUlInUx"
    return b"".join(parts) + skippable(listed) + skippable(footer)


def seekable(plain: bytes) -> bytes:
    """Frames of equal plain length; then the table of their lengths in a skippable frame."""
    parts = [(frame(part), len(part)) for part in cut(plain, PART)]
    table = b"".join(struct.pack("<II", len(stored), length) for stored, length in parts)
    table += struct.pack("<IBI", len(parts), 0, 0x8F92EAB1)
    return b"".join(stored for stored, _ in parts) + skippable(table, 14)


def parallel(plain: bytes) -> bytes:
    """Each frame behind a skippable one that tells its length."""
    parts = [frame(part) for part in cut(plain, PART)]
    return b"".join(skippable(struct.pack("<I", len(part))) + part for part in parts)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "zstd:chunked": chunked,
    "seekable": seekable,
    "pzstd": parallel,
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_chunk_of_a_layer_of_frames_costs_a_frame_or_two(bench: Bench, form: str) -> None:
    blob = FORMS[form](PLAIN)
    view = bench.layers.add(PLAIN, blob, bench.tiers)
    assert bench.layers.sources[view][0].index.random_access
    for offset in range(50_000, len(PLAIN) - 4096, 100_000):
        before = bench.tier.sent_bytes
        assert await bench.read(view, offset, 100) == PLAIN[offset : offset + 100]
        await until(lambda: bench.tier.open_reads == 0)
        assert bench.tier.sent_bytes - before <= len(frame(PLAIN[: 2 * PART + SMALL.spacing_bytes]))
    assert bench.tier.sent_bytes < len(blob) / 2


@pytest.mark.parametrize("form", FORMS)
async def test_all_of_a_layer_of_frames_reads_right_in_any_order(bench: Bench, form: str) -> None:
    view = bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    chance = random.Random(form)
    for _ in range(60):
        offset, length = chance.randrange(len(PLAIN)), chance.randrange(1, 30_000)
        assert await bench.read(view, offset, length) == PLAIN[offset : offset + length]
    await bench.road.complete(view)
    opened = bench.store.get(view)
    assert opened is not None
    assert opened.complete
    assert opened.path.read_bytes()[: len(PLAIN)] == PLAIN


async def test_the_list_at_the_end_of_a_layer_is_never_fetched(bench: Bench) -> None:
    blob = chunked(PLAIN)
    view = bench.layers.add(PLAIN, blob, bench.tiers)
    assert await bench.read(view, 0, len(PLAIN)) == PLAIN
    listed = struct.unpack("<Q", blob[-40:-32])[0] - 8
    ends = [asked.extent.end for asked in bench.tier.asked if asked.extent is not None]
    assert max(ends) <= listed
