"""A layer is indexed only if all that was promised of it holds; else it is named what failed."""

from __future__ import annotations

import bz2
import errno
import hashlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.content import Compression, Digest
from snapshotter.errors import (
    CorruptError,
    InvalidArgumentError,
    NoSpaceError,
    RefusedError,
)
from snapshotter.image import index_writer
from snapshotter.image.decode import Decoder, plan
from snapshotter.image.indexer import IndexLimits, LayerIndexer
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import TarLayerScanner
from tests.unit.image.layers import (
    SMALL,
    View,
    frame,
    index_of,
    member,
    members,
    sha256,
    skippable,
    text,
)
from tests.unit.image.scanned import PLAIN, FakeScanner, leftovers


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


def test_a_disk_that_is_full_for_the_windows_is_named(tmp_path: Path) -> None:
    blob = member(PLAIN, memory_level=1)
    real = index_writer.open_private

    def full(path: Path) -> BinaryIO:
        return Path("/dev/full").open("wb") if ".win" in path.name else real(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_writer, "open_private", full)
        with pytest.raises(NoSpaceError, match=r"no space for .*\.win.*free some"):
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
