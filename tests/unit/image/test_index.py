"""An index file is read whole or refused by name; a killed writer leaves none or a whole one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError, NotFoundError, RefusedError
from snapshotter.image import index_layout as layout
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_writer import index_path, remove_leftovers
from snapshotter.image.stream import PointKind
from tests.unit.image.layers import index_of, member, sha256, text

PLAIN = text(200_000)
BLOB = member(PLAIN, memory_level=4)


def parse(data: bytes) -> LayerIndex:
    return LayerIndex(memoryview(data), None, where="given.idx")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> LayerIndex:
    return index_of(BLOB, PLAIN, tmp_path_factory.mktemp("index"))


def test_an_index_says_again_what_was_recorded(index: LayerIndex) -> None:
    again = LayerIndex.open(Path(index.where), layer=sha256(BLOB))
    assert again.diff_id == sha256(PLAIN)
    assert again.chunk_count == -(-len(PLAIN) // again.chunk_bytes) == 49
    assert again.chunk_extent(48).length == len(PLAIN) - 48 * 4096
    assert again.chunk_digest(48) == blake3(PLAIN[48 * 4096 :]).digest()
    assert 0 < again.chunk_input_end(0) < again.chunk_input_end(48) <= len(BLOB)
    first = again.nearest_checkpoint(0)
    assert (first.in_offset, first.out_offset, first.kind) == (0, 0, PointKind.MEMBER)
    for number in range(1, again.checkpoint_count):
        point = again.checkpoint(number)
        assert again.nearest_checkpoint(point.out_offset) == point
        assert again.nearest_checkpoint(point.out_offset - 1).number == number - 1
        window = again.restart_point(point).window
        plain = PLAIN[: point.out_offset][-32768:]
        assert len(window) == len(plain)
        assert all(kept in (0, byte) for kept, byte in zip(window, plain, strict=True))
    assert again.longest_run_bytes < 40_000


def test_what_is_not_there_is_named(index: LayerIndex, tmp_path: Path) -> None:
    for number in (-1, index.chunk_count):
        with pytest.raises(InvalidArgumentError, match="which has 49 chunks"):
            index.chunk_digest(number)
        with pytest.raises(InvalidArgumentError):
            index.chunk_extent(number)
    with pytest.raises(InvalidArgumentError, match="checkpoint"):
        index.checkpoint(index.checkpoint_count)
    with pytest.raises(NotFoundError, match="no index"):
        LayerIndex.open(tmp_path / "absent.idx")
    other = Digest("sha256", "0" * 64)
    with pytest.raises(RefusedError, match=r"is the index of .*, not of"):
        LayerIndex.open(Path(index.where), layer=other)


def test_an_index_cut_at_any_byte_is_refused(index: LayerIndex, tmp_path: Path) -> None:
    whole = bytes(index.data)
    for cut in range(len(whole)):
        with pytest.raises(RefusedError, match=r"given\.idx"):
            parse(whole[:cut])
    torn = tmp_path / "torn.idx"
    for cut in (0, 1, 511, 512, len(whole) - 1):
        torn.write_bytes(whole[:cut])
        with pytest.raises(RefusedError, match=r"torn\.idx"):
            LayerIndex.open(torn, verify=False)


def test_any_flipped_bit_is_refused(index: LayerIndex) -> None:
    whole = bytes(index.data)
    for at in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises(RefusedError, match=r"given\.idx"):
            parse(bytes(flipped))
    with pytest.raises(RefusedError, match="should be"):
        parse(whole + b"\0")


def test_another_version_is_refused_by_name(index: LayerIndex) -> None:
    other = bytearray(index.data)
    other[8] = 7
    with pytest.raises(RefusedError, match="made by a newer Ember: it is of version 7, this one"):
        parse(bytes(other))
    other[8] = 1
    with pytest.raises(RefusedError, match="version 1, this Ember reads 2: remove it"):
        parse(bytes(other))


def forged(index: LayerIndex, body: bytes, **header: Any) -> bytes:
    """A file with right checksums, as one gets it who may write whatever they like."""
    old = layout.unpack_header(index.data, "old")
    new = replace(old, body_digest=blake3(body).digest(), **header)
    return new.pack() + body


def with_checkpoint(index: LayerIndex, number: int, **fields: int) -> bytes:
    names = ("in_offset", "out_offset", "window_offset", "stored", "window", "bits", "kind")
    at = layout.unpack_header(index.data, "old").checkpoints_offset
    at += number * layout.CHECKPOINT_BYTES - layout.HEADER_BYTES
    body = bytearray(index.data[layout.HEADER_BYTES :])
    *values, digest = layout.CHECKPOINT.unpack_from(body, at)
    row = dict(zip(names, values, strict=True)) | fields
    layout.CHECKPOINT.pack_into(body, at, *row.values(), digest)
    return forged(index, bytes(body))


@pytest.mark.parametrize(
    "fields",
    [
        {"in_offset": 1 << 50},
        {"in_offset": 0},
        {"out_offset": 0},
        {"out_offset": 1 << 60},
        {"window_offset": 1 << 60},
        {"stored": 1 << 31},
        {"stored": 0},
        {"window": 0},
        {"window": 40_000},
        {"bits": 8},
        {"kind": 2},
        {"kind": 0},
    ],
)
def test_a_forged_checkpoint_is_refused(index: LayerIndex, fields: dict[str, int]) -> None:
    assert parse(with_checkpoint(index, 2)).layer == index.layer
    with pytest.raises(RefusedError, match=r"given\.idx: checkpoint [23] "):
        parse(with_checkpoint(index, 2, **fields))


def test_windows_that_lie_over_each_other_are_refused(index: LayerIndex) -> None:
    before, point = index.checkpoint(1), index.checkpoint(2)
    assert point.window_offset == before.window_offset + before.window_stored_bytes
    for offset in (point.window_offset - 1, before.window_offset, 0):
        with pytest.raises(RefusedError, match="checkpoint 2 has a window that lies over another"):
            parse(with_checkpoint(index, 2, window_offset=offset))


def test_what_stands_where_nothing_belongs_is_refused(index: LayerIndex) -> None:
    header = bytearray(index.data[: layout.HEADER_BYTES])
    for at in (layout.HEADER.size, 400, layout.HEADER_BYTES - layout.CHECKSUM.size - 1, 27):
        odd = header.copy()
        odd[at] = 1
        odd[-layout.CHECKSUM.size :] = blake3(odd[: -layout.CHECKSUM.size]).digest()
        with pytest.raises(RefusedError, match=r"where nothing belongs|given\.idx: .*"):
            parse(bytes(odd) + bytes(index.data[layout.HEADER_BYTES :]))
    parsed = layout.unpack_header(index.data, "old")
    body = bytearray(index.data[layout.HEADER_BYTES :])
    body[parsed.tables_end - layout.HEADER_BYTES] = 1
    assert parsed.tables_end < parsed.erofs_offset
    with pytest.raises(RefusedError, match="between its tables and its image"):
        parse(forged(index, bytes(body)))


def test_counts_that_no_memory_holds_cost_none(index: LayerIndex) -> None:
    body = bytes(index.data[layout.HEADER_BYTES :])
    tracemalloc.start()
    try:
        for field in ("view_bytes", "checkpoint_count", "erofs_bytes"):
            for value in (1 << 40, 1 << 55):
                with pytest.raises(RefusedError, match=r"given\.idx"):
                    parse(forged(index, body, **{field: value}))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_forged_chunk_table_is_refused(index: LayerIndex) -> None:
    header = layout.unpack_header(index.data, "old")
    for number, end in ((5, 1 << 60), (5, 1), (0, 0), (48, len(BLOB) + 1)):
        body = bytearray(index.data[layout.HEADER_BYTES :])
        at = header.ends_offset - layout.HEADER_BYTES + number * layout.END_BYTES
        body[at : at + 8] = end.to_bytes(8, "little")
        with pytest.raises(RefusedError, match=r"chunk table|checkpoint"):
            parse(forged(index, bytes(body)))


@pytest.mark.parametrize(
    "header",
    [
        {"chunk_bytes": 12345},
        {"view_bytes": 1 << 60},
        {"view_bytes": 100_000},
        {"checkpoint_count": 0},
        {"checkpoint_count": 1 << 40},
        {"erofs_bytes": 1 << 40},
        {"blob_bytes": 1},
        {"windows_bytes": 1},
    ],
)
def test_a_forged_header_is_refused(index: LayerIndex, header: dict[str, int]) -> None:
    with pytest.raises(RefusedError, match=r"given\.idx"):
        parse(forged(index, bytes(index.data[layout.HEADER_BYTES :]), **header))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 1 << 20), value=st.binary(min_size=1, max_size=16))
def test_a_forged_body_is_refused_or_in_bounds(index: LayerIndex, at: int, value: bytes) -> None:
    body = bytearray(index.data[layout.HEADER_BYTES :])
    at %= len(body) - len(value)
    body[at : at + len(value)] = value
    try:
        other = parse(forged(index, bytes(body)))
    except RefusedError as error:
        assert "given.idx" in str(error)
        return
    for number in range(other.chunk_count):
        point = other.nearest_checkpoint(other.chunk_extent(number).offset)
        assert point.out_offset <= number * other.chunk_bytes
        assert point.in_offset < other.chunk_input_end(number) <= other.blob_bytes


def test_a_plain_index_with_any_other_table_than_the_identity_is_refused(tmp_path: Path) -> None:
    index = index_of(PLAIN, PLAIN, tmp_path)
    body = bytearray(index.data[layout.HEADER_BYTES :])
    at = layout.unpack_header(index.data, "old").ends_offset - layout.HEADER_BYTES
    body[at] ^= 1
    with pytest.raises(RefusedError, match="not the identity"):
        parse(forged(index, bytes(body)))


def test_an_index_replaces_an_older_one_of_the_same_layer(tmp_path: Path) -> None:
    first = bytes(index_of(BLOB, PLAIN, tmp_path).data)
    second = index_of(BLOB, PLAIN, tmp_path)
    assert bytes(second.data) == first
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".idx", ".win"]
    assert index_path(tmp_path, sha256(BLOB)) == Path(second.where)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


_KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from tests.unit.image.test_index import BLOB, PLAIN
from tests.unit.image.layers import index_of

left = int(sys.argv[2])

def counted(real):
    def call(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call

os.fsync = counted(os.fsync)
os.open = counted(os.open)
Path.rename = counted(Path.rename)
Path.unlink = counted(Path.unlink)
index_of(BLOB, PLAIN, Path(sys.argv[1]))
"""


def test_a_writer_killed_at_any_step_leaves_no_index_or_a_whole_one(tmp_path: Path) -> None:
    expected = bytes(index_of(BLOB, PLAIN, tmp_path).data)
    path = index_path(tmp_path, sha256(BLOB))
    killed = 0
    for step in range(100):
        ended = subprocess.run(
            [sys.executable, "-c", _KILLED_WRITER, str(tmp_path), str(step)], check=False
        )
        if path.exists():
            again = LayerIndex.open(path, layer=sha256(BLOB))
            assert bytes(again.data) == expected
            assert again.restart_point(again.checkpoint(3)).window
        remove_leftovers(tmp_path)
        assert {entry.suffix for entry in tmp_path.iterdir()} <= {".idx", ".win"}
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
        killed += 1
    assert killed >= 8
    assert path.exists()


@pytest.mark.parametrize("size", [1 << 28, 1 << 40], ids=["true", "a lie"])
def test_a_window_that_unpacks_to_more_takes_no_memory(index: LayerIndex, size: int) -> None:
    """Thirty kilobytes of a stranger's are a gigabyte, and its header may promise any length."""
    if size < 1 << 30:
        stored = zstandard.ZstdCompressor().compress(bytes(size))
    else:
        stored = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"
    digest = blake3(stored).digest(layout.WINDOW_DIGEST_BYTES)
    point = replace(index.checkpoint(1), window_stored_bytes=len(stored), window_digest=digest)
    tracemalloc.start()
    with pytest.raises(RefusedError, match="window of checkpoint 1"):
        index.restart_point(point, stored)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("spoil", [lambda good: good[:-1], lambda good: good + b"x"])
def test_a_window_is_one_whole_frame(index: LayerIndex, spoil: Callable[[bytes], bytes]) -> None:
    good = index.local_window(index.checkpoint(1))
    assert good
    stored = spoil(good)
    digest = blake3(stored).digest(layout.WINDOW_DIGEST_BYTES)
    point = replace(index.checkpoint(1), window_stored_bytes=len(stored), window_digest=digest)
    with pytest.raises(RefusedError, match="window of checkpoint 1"):
        index.restart_point(point, stored)
