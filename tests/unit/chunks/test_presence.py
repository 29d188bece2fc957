"""A presence file is believed only where it checks out, and never says more than was synced."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.chunks.presence import (
    Header,
    Presence,
    boot_id,
    decode_header,
    decode_slot,
    encode_header,
    encode_slot,
    read_presence,
)
from snapshotter.content import Digest
from snapshotter.errors import RefusedError

VIEW = Digest("sha512", "cd" * 64)
HEADER = Header(VIEW, 100 * 4096 + 1, 4096, b"boot" * 4, False, False)


@given(
    st.integers(0, 1 << 50),
    st.integers(1, 64).map(lambda n: n * 4096),
    st.binary(min_size=16, max_size=16),
    st.booleans(),
    st.booleans(),
)
def test_a_header_reads_as_it_was_written(
    view_bytes: int, chunk_bytes: int, boot: bytes, clean: bool, suspect: bool
) -> None:
    header = Header(VIEW, view_bytes, chunk_bytes, boot, clean, suspect)
    assert decode_header(encode_header(header)) == header


@given(st.integers(0, 8 * 230 - 1), st.data())
def test_a_header_with_a_flipped_bit_is_refused(bit: int, data: st.DataObject) -> None:
    raw = bytearray(encode_header(HEADER))
    used = len(bytes(raw).rstrip(b"\0"))
    raw[bit // 8 % used] ^= 1 << bit % 8
    with pytest.raises(RefusedError, match="presence file"):
        decode_header(bytes(raw))
    cut = data.draw(st.integers(0, used - 1))
    with pytest.raises(RefusedError):
        decode_header(encode_header(HEADER)[:cut])


@given(st.integers(0, 1 << 60), st.binary(max_size=40), st.data())
def test_a_slot_is_whole_or_nothing(generation: int, bitmap: bytes, data: st.DataObject) -> None:
    raw = encode_slot(generation, bitmap)
    assert decode_slot(raw, len(bitmap)) == (generation, bitmap)
    assert decode_slot(raw[:-1], len(bitmap)) is None
    assert decode_slot(raw + b"x", len(bitmap) + 1) is None
    checked = [*range(40), *range(64, len(raw))]
    torn = bytearray(raw)
    torn[data.draw(st.sampled_from(checked))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_slot(bytes(torn), len(bitmap)) is None


def test_a_write_torn_anywhere_costs_its_batch_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "presence"
    presence = Presence.open(path, HEADER, trusted=True)
    presence.write_durable(b"\x01" + bytes(12))
    before = path.read_bytes()
    presence.write_durable(b"\x03" + bytes(12))
    presence.close()
    after = path.read_bytes()
    changed = [at for at in range(len(after)) if after[at] != before[at]]
    reboot = Header(VIEW, HEADER.view_bytes, 4096, b"next" * 4, False, False)
    for cut in range(changed[0], changed[-1] + 2):
        path.write_bytes(after[:cut] + before[cut:])
        header, believed = read_presence(path, reboot.boot)
        assert header.view == VIEW
        assert believed[0] == (1 if cut <= changed[-1] else 3)
        again = Presence.open(path, reboot, trusted=True)
        assert again.readable.snapshot() == again.durable == believed
        assert again.header.suspect
        again.close()


@pytest.mark.parametrize(
    "other",
    [
        Header(Digest("sha512", "ce" * 64), HEADER.view_bytes, 4096, HEADER.boot, False, False),
        Header(VIEW, HEADER.view_bytes + 1, 4096, HEADER.boot, False, False),
        Header(VIEW, HEADER.view_bytes, 8192, HEADER.boot, False, False),
    ],
)
def test_the_file_of_another_view_says_nothing(tmp_path: Path, other: Header) -> None:
    presence = Presence.open(tmp_path / "presence", other, trusted=True)
    presence.write_durable(b"\xff" * other.bitmap_bytes)
    presence.readable.set(0, 10)
    presence.close()
    again = Presence.open(tmp_path / "presence", HEADER, trusted=True)
    assert again.readable.population() == 0
    assert again.durable == bytes(HEADER.bitmap_bytes)
    again.close()


def test_bits_behind_the_last_chunk_are_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "presence"
    Presence.open(path, HEADER, trusted=True).close()
    raw = bytearray(path.read_bytes())
    raw[4096 : 4096 + 4096] = b"\xff" * 4096
    path.write_bytes(raw)
    again = Presence.open(path, HEADER, trusted=True)
    assert again.readable.population() == 101
    again.close()


def test_a_bitmap_that_somebody_looks_at_stays_mapped(tmp_path: Path) -> None:
    presence = Presence.open(tmp_path / "presence", HEADER, trusted=True)
    seen = memoryview(presence.readable.memory)
    presence.readable.set(3)
    presence.close()
    assert seen[0] == 8


def test_this_boot_has_a_name() -> None:
    assert len(boot_id()) == 16
    assert boot_id() == boot_id() != bytes(16)
