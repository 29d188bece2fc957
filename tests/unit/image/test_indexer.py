"""A layer is indexed only if all that was promised of it holds; else it is named what failed."""

from __future__ import annotations

import bz2
import errno
import hashlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.content import Compression, Digest
from snapshotter.errors import (
    CorruptError,
    EmberError,
    InvalidArgumentError,
    NoSpaceError,
    RefusedError,
)
from snapshotter.image.decode import Decoder, plan
from snapshotter.image.indexer import IndexLimits, LayerIndexer
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import LayerMetadata, TarLayerScanner
from tests.unit.image.layers import (
    SMALL,
    View,
    frame,
    index_of,
    member,
    members,
    sha256,
    skippable,
    tar,
    text,
)

PLAIN = tar([("a/file", text(50_000)), ("b", b"x" * 1000), ("empty", b"")])


class FakeScanner:
    """Keeps what it is fed; refuses at ``refuse_at`` plain bytes, or at the end."""

    def __init__(self, refuse_at: int | None = None, *, refuse_end: bool = False) -> None:
        self.data = bytearray()
        self._refuse_at = refuse_at
        self._refuse_end = refuse_end

    def feed(self, data: memoryview) -> None:
        self.data += data
        if self._refuse_at is not None and len(self.data) > self._refuse_at:
            raise RefusedError("entry 'x': points out of the root")

    def finish(self, view: Digest, view_bytes: int) -> LayerMetadata:
        if self._refuse_end:
            raise RefusedError("entry 'x': the archive ends inside it")
        assert sha256(bytes(self.data)) == view
        assert len(self.data) == view_bytes
        return LayerMetadata(b"metadata of " + view.hex.encode(), True, 3)


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in {".idx", ".win"})


@pytest.mark.parametrize(
    ("blob", "compression"),
    [
        (member(PLAIN), Compression.GZIP),
        (members(PLAIN, 3000), Compression.GZIP),
        (member(PLAIN) + bytes(1024), Compression.GZIP),
        (frame(PLAIN), Compression.ZSTD),
        (skippable(b"first", 5) + frame(PLAIN), Compression.ZSTD),
        (PLAIN, Compression.PLAIN),
    ],
)
def test_content_decides_the_compression(
    tmp_path: Path, blob: bytes, compression: Compression
) -> None:
    view = View()
    index = index_of(blob, PLAIN, tmp_path, sink=view, scanner=FakeScanner(), piece_bytes=997)
    assert index.compression is compression
    assert (index.layer, index.diff_id) == (sha256(blob), sha256(PLAIN))
    assert (index.blob_bytes, index.view_bytes) == (len(blob), len(PLAIN))
    assert bytes(index.erofs) == b"metadata of " + index.diff_id.hex.encode()
    assert (index.needs_chain, index.entry_count) == (True, 3)
    assert bytes(view.data) == PLAIN
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("piece_bytes", [1, 2, 5, 4096])
def test_the_index_does_not_depend_on_the_pieces(tmp_path: Path, piece_bytes: int) -> None:
    for blob in (member(PLAIN[:9000]), frame(PLAIN[:9000]), PLAIN[:9000]):
        whole = index_of(blob, PLAIN[:9000], tmp_path)
        expected = bytes(whole.data)
        pieces = index_of(blob, PLAIN[:9000], tmp_path, piece_bytes=piece_bytes)
        assert bytes(pieces.data) == expected


def test_a_longer_index_is_a_function_of_its_blob_too(tmp_path: Path) -> None:
    plain = text(900_000)
    for blob in (member(plain, 6, 1), members(plain, 50_000), frame(plain)):
        expected = bytes(index_of(blob, plain, tmp_path).data)
        for piece_bytes in (777, 65_535, 65_537, 200_000):
            assert bytes(index_of(blob, plain, tmp_path, piece_bytes=piece_bytes).data) == expected


def test_empty_layers_of_every_kind_are_accepted(tmp_path: Path) -> None:
    for blob in (b"", member(b""), frame(b""), skippable(b""), member(b"") * 3):
        index = index_of(blob, b"", tmp_path)
        assert (index.view_bytes, index.chunk_count) == (0, 0)
        assert plan(index, []) == []
    docker_empty = member(bytes(1024))
    assert index_of(docker_empty, bytes(1024), tmp_path).view_bytes == 1024


def test_a_blob_shorter_than_any_magic_is_plain(tmp_path: Path) -> None:
    for blob in (b"\x1f", b"\x1f\x8b", b"\x28\xb5\x2f", b"BZ"):
        assert index_of(blob, blob, tmp_path).compression is Compression.PLAIN


@pytest.mark.parametrize(
    ("blob", "name"),
    [
        (bz2.compress(PLAIN), "bzip2"),
        (lzma.compress(PLAIN), "xz"),
        (b"\x04\x22\x4d\x18" + PLAIN, "lz4"),
    ],
)
def test_compressions_that_oci_does_not_have_are_named(
    tmp_path: Path, blob: bytes, name: str
) -> None:
    with pytest.raises(RefusedError, match=f"compressed with {name}.*gzip, zstd or plain"):
        index_of(blob, PLAIN, tmp_path)


def test_a_diff_id_that_lies_is_refused(tmp_path: Path) -> None:
    for blob in (member(PLAIN), frame(PLAIN), PLAIN):
        with pytest.raises(RefusedError, match=r"diffID sha256:.*rebuild"):
            index_of(blob, PLAIN + b"x", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_digest_algorithms_are_checked_too(tmp_path: Path) -> None:
    blob = member(PLAIN)
    layer = Digest("sha512", hashlib.sha512(blob).hexdigest())
    for plain in (PLAIN, PLAIN + b"x"):
        diff_id = Digest("sha512", hashlib.sha512(plain).hexdigest())
        indexer = LayerIndexer(
            layer, diff_id, blob_bytes=len(blob), sink=None, directory=tmp_path, limits=SMALL
        )
        indexer.feed(blob)
        if plain == PLAIN:
            assert indexer.finish().diff_id == diff_id
        else:
            with pytest.raises(RefusedError, match="diffID sha512"):
                indexer.finish()
    stored = LayerIndexer(
        Digest("sha512", hashlib.sha512(PLAIN).hexdigest()),
        sha256(PLAIN),
        blob_bytes=len(PLAIN),
        sink=None,
        directory=tmp_path,
    )
    stored.feed(PLAIN)
    assert stored.finish().diff_id == sha256(PLAIN)


def test_without_a_diff_id_the_plain_bytes_name_themselves(tmp_path: Path) -> None:
    assert index_of(member(PLAIN), None, tmp_path).diff_id == sha256(PLAIN)


def test_a_broken_transfer_is_no_refusal(tmp_path: Path) -> None:
    for blob in (member(PLAIN), frame(PLAIN), PLAIN):
        for at in range(0, len(blob), len(blob) // 9 + 1):
            broken = bytearray(blob)
            broken[at] ^= 16
            indexer = LayerIndexer(
                sha256(blob),
                sha256(PLAIN),
                blob_bytes=len(blob),
                sink=None,
                directory=tmp_path,
                limits=SMALL,
                scanner=FakeScanner(),
            )
            indexer.feed(broken)
            with pytest.raises(CorruptError, match=r"bytes received for layer .* are sha256:"):
                indexer.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_blob_of_another_length_than_promised_is_named(tmp_path: Path) -> None:
    blob = member(PLAIN)

    def indexer(blob_bytes: int) -> LayerIndexer:
        return LayerIndexer(
            sha256(blob), None, blob_bytes=blob_bytes, sink=None, directory=tmp_path
        )

    with indexer(len(blob) - 1) as short, pytest.raises(CorruptError, match="longer than the"):
        short.feed(blob)
    with indexer(len(blob) + 1) as long:
        long.feed(blob)
        with pytest.raises(CorruptError, match=rf"ended after {len(blob)} of {len(blob) + 1}"):
            long.finish()


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
    for at, word in ((-8, "incorrect data check"), (-1, "incorrect length check")):
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


def test_closing_half_way_leaves_nothing(tmp_path: Path) -> None:
    blob = member(text(4 << 20), memory_level=1)
    indexer = LayerIndexer(
        sha256(blob), None, blob_bytes=len(blob), sink=None, directory=tmp_path, limits=SMALL
    )
    indexer.feed(blob[: len(blob) // 2])
    assert indexer.view_bytes > 1 << 20
    indexer.close()
    indexer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    blob = member(PLAIN, memory_level=1)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(NoSpaceError, match=r"no space for .*free some"):
            index_of(blob, PLAIN, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_limits_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for limits in (IndexLimits(spacing_bytes=100), IndexLimits(chunk_bytes=5000)):
        with pytest.raises(InvalidArgumentError, match="power of two"):
            index_of(PLAIN, PLAIN, tmp_path, limits=limits)


def test_the_memory_of_the_caller_is_free_after_feed(tmp_path: Path) -> None:
    for blob in (member(PLAIN), PLAIN, frame(PLAIN)):
        buffer = bytearray(32 * 1024)
        with LayerIndexer(
            sha256(blob), sha256(PLAIN), blob_bytes=len(blob), sink=None, directory=tmp_path
        ) as indexer:
            for at in range(0, len(blob), len(buffer)):
                piece = blob[at : at + len(buffer)]
                buffer[: len(piece)] = piece
                indexer.feed(memoryview(buffer)[: len(piece)])
                buffer[:] = bytes(len(buffer))
            assert indexer.finish().view_bytes == len(PLAIN)


@pytest.mark.parametrize("form", [lambda plain: plain, member, frame])
def test_a_tar_becomes_a_metadata_image(tmp_path: Path, form: Callable[[bytes], bytes]) -> None:
    blob = form(PLAIN)
    scanner = TarLayerScanner(ScanLimits())
    index = index_of(blob, PLAIN, tmp_path, scanner=scanner, piece_bytes=700)
    image = bytes(index.erofs)
    assert image[1024:1028] == b"\xe2\xe1\xf5\xe0"
    assert index.diff_id.hex.encode() in image
    assert all(name in image for name in (b"file", b"empty"))
    assert index.entry_count == 3
    assert index.needs_chain
    again = LayerIndexer(
        sha256(blob), sha256(PLAIN), blob_bytes=len(blob), sink=None, directory=tmp_path
    )
    again.feed(blob)
    assert bytes(again.finish().erofs) == bytes(index.erofs)


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    for blob in (text(4000), member(text(4000)), frame(b"short"), member(member(PLAIN))):
        scanner = TarLayerScanner(ScanLimits())
        with pytest.raises(RefusedError, match="layer sha256:"):
            index_of(blob, None, tmp_path, scanner=scanner)


stored_form = st.sampled_from(["plain", "gzip", "members", "zstd", "frames"])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plain=st.binary(max_size=3000).map(lambda seed: seed * 23),
    cuts=st.lists(st.integers(1, 40_000), max_size=4),
    level=st.integers(0, 9),
    form=stored_form,
)
def test_any_bytes_in_any_form_come_back(
    tmp_path: Path, plain: bytes, cuts: list[int], level: int, form: str
) -> None:
    pieces, rest = [], plain
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    blob = {
        "plain": lambda: b"\0" + plain[1:] if plain else b"",
        "gzip": lambda: member(plain, level, 1),
        "members": lambda: b"".join(member(piece, level) for piece in pieces),
        "zstd": lambda: frame(plain, level + 1),
        "frames": lambda: b"".join(frame(piece, level + 1) for piece in pieces),
    }[form]()
    plain = blob if form == "plain" else plain
    index = index_of(blob, plain, tmp_path)
    for number in range(index.chunk_count):
        (span,) = plan(index, [number])
        chunks = dict(Decoder(index, span).feed(blob[span.in_offset : span.in_end]))
        extent = index.chunk_extent(number)
        assert chunks[number] == plain[extent.offset : extent.end]


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
