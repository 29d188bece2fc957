"""What an indexer refuses, and that nothing of it stays: streams that lie, bombs, hostile bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.errors import (
    EmberError,
    NoSpaceError,
    RefusedError,
)
from snapshotter.image.indexer import IndexLimits, LayerIndexer
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import TarLayerScanner
from tests.unit.image.layers import (
    View,
    frame,
    index_of,
    member,
    sha256,
    skippable,
    tar,
    text,
)
from tests.unit.image.scanned import PLAIN, FakeScanner


def test_a_gzip_cut_anywhere_is_refused(tmp_path: Path) -> None:
    plain = text(3000)
    for blob in (member(plain), member(plain[:1000]) + member(plain[1000:])):
        for cut in range(8, len(blob), 7):
            if blob[:cut] == member(plain[:1000]):
                continue
            with pytest.raises(RefusedError, match="gzip stream is cut"):
                index_of(blob[:cut], None, tmp_path)
        with pytest.raises(RefusedError, match="gzip stream is cut"):
            index_of(blob[:-1], plain, tmp_path)


def test_a_gzip_whose_trailer_lies_is_refused(tmp_path: Path) -> None:
    for at, word in ((-8, "incorrect data check"), (-1, "incorrect (data|length) check")):
        blob = bytearray(member(PLAIN))
        blob[at] ^= 1
        with pytest.raises(RefusedError, match=rf"gzip stream, compressed byte \d+: {word}"):
            index_of(bytes(blob), PLAIN, tmp_path)


def test_junk_behind_a_gzip_is_refused(tmp_path: Path) -> None:
    for junk in (b"junk", bytes(100) + b"x", b"\x1f", b"\x1f\x8b\x09"):
        with pytest.raises(RefusedError, match="gzip stream"):
            index_of(member(PLAIN) + junk, PLAIN, tmp_path)


def test_a_zstd_cut_anywhere_is_refused(tmp_path: Path) -> None:
    plain = text(3000)
    blob = frame(plain, checksum=True) + skippable(b"abcdef")
    whole = len(frame(plain, checksum=True))
    for cut in range(6, len(blob)):
        if cut != whole:
            with pytest.raises(RefusedError, match=r"zstd frame at compressed byte \d+.*ends"):
                index_of(blob[:cut], None, tmp_path)


def zstd_faults() -> dict[str, tuple[bytes, str]]:
    good = frame(PLAIN)
    bare = frame(text(500), checksum=False, sized=False)
    return {
        "checksum": (good[:-1] + bytes([good[-1] ^ 1]), "checksum"),
        "junk": (good + b"junk", "no zstd frame begins with 6a756e6b"),
        "reserved bit": (good[:4] + bytes([good[4] | 8]) + good[5:], "reserved bit"),
        "dictionary": (
            bare[:4] + bytes([bare[4] | 1]) + bare[5:6] + b"\7" + bare[6:],
            "the dictionary 07",
        ),
        "window": (bare[:5] + bytes([21 << 3]) + bare[6:], "needs a window of 2147483648"),
        "block kind": (bare[:6] + bytes([bare[6] | 6]) + bare[7:], "a block of kind 3"),
        "huge block": (bare[:6] + b"\xfc\xff\xff" + bare[9:], "a block of kind"),
        "content size": (good[:5] + bytes([good[5] ^ 1]) + good[6:], "zstd frame"),
    }


@pytest.mark.parametrize("fault", zstd_faults())
def test_a_zstd_frame_that_lies_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    blob, word = zstd_faults()[fault]
    with pytest.raises(RefusedError, match=word):
        index_of(blob, None, tmp_path)


def test_bombs_are_refused_by_name(tmp_path: Path) -> None:
    zeros = bytes(8 << 20)
    limits = IndexLimits(bomb_floor_bytes=2 << 20, max_ratio=200)
    for blob in (member(zeros), frame(zeros), frame(zeros, sized=False)):
        view = View()
        with pytest.raises(RefusedError, match="decompression bomb"):
            index_of(blob, zeros, tmp_path, limits=limits, sink=view)
        assert len(view.data) <= 3 << 20
    with pytest.raises(RefusedError, match="decompression bomb"):
        index_of(zeros, zeros, tmp_path, limits=IndexLimits(max_view_bytes=1 << 20))
    assert index_of(member(zeros), zeros, tmp_path).view_bytes == len(zeros)


def test_a_refused_entry_is_named_and_nothing_more_is_written(tmp_path: Path) -> None:
    plain = text(5 << 20)
    view = View()
    with pytest.raises(RefusedError, match=r"layer sha256:.*entry 'x': points out of the root"):
        index_of(member(plain, 1), plain, tmp_path, sink=view, scanner=FakeScanner(1 << 20))
    assert len(view.data) <= 2 << 20
    with pytest.raises(RefusedError, match="entry 'x': the archive ends inside it"):
        index_of(PLAIN, PLAIN, tmp_path, scanner=FakeScanner(refuse_end=True))
    assert list(tmp_path.iterdir()) == []


def test_a_fault_shows_before_the_end(tmp_path: Path) -> None:
    blob = member(PLAIN) + b"junk" + bytes(100_000)
    with LayerIndexer(
        sha256(blob), None, blob_bytes=len(blob), sink=None, directory=tmp_path
    ) as indexer:
        indexer.feed(blob[:-1])
        assert indexer.fault is not None
        assert "not gzip" in str(indexer.fault) or "header" in str(indexer.fault)


def test_what_the_sink_raises_reaches_the_caller(tmp_path: Path) -> None:
    def full(offset: int, data: memoryview) -> None:
        raise NoSpaceError("the view's file system is full")

    blob = tar([("big", text(9 << 20))])
    with (
        LayerIndexer(
            sha256(blob), None, blob_bytes=len(blob), sink=full, directory=tmp_path
        ) as indexer,
        pytest.raises(NoSpaceError, match="full"),
    ):
        for at in range(0, len(blob), 1 << 20):
            indexer.feed(blob[at : at + (1 << 20)])


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    for blob in (text(4000), member(text(4000)), frame(b"short"), member(member(PLAIN))):
        scanner = TarLayerScanner(ScanLimits())
        with pytest.raises(RefusedError, match="layer sha256:"):
            index_of(blob, None, tmp_path, scanner=scanner)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_hostile_blobs_are_refused_and_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    blob = bytearray(data.draw(st.sampled_from([member(PLAIN[:4000]), frame(PLAIN[:4000])])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob) - 1))
        blob[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        index = index_of(bytes(blob), None, tmp_path)
    except EmberError as error:
        assert isinstance(error, RefusedError)
        assert "sha256:" in str(error)
    else:
        assert index.blob_bytes == len(blob)
