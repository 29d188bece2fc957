"""Bombs and bad bytes: every bound of a scan holds, and no input brings anything but a refusal."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotter.errors import RefusedError
from snapshotter.image.limits import ScanLimits
from snapshotter.image.tar import TarScanner
from tests.cases.layers import in_one_layer
from tests.cases.sparse import sparse_pax
from tests.cases.stacks import of_several_layers
from tests.cases.tars import directory, file, hardlink, header, layer, padded, pax, symlink
from tests.layerstack import scan


@pytest.mark.parametrize(
    ("limits", "plain", "word"),
    [
        (ScanLimits(inodes=5), layer(*[file(b"%d" % n) for n in range(6)]), "5 files"),
        (ScanLimits(inodes=5), layer(file(b"a/b/c/d/e/f")), "5 files"),
        (ScanLimits(text_bytes=100), layer(symlink(b"x", b"t" * 100)), "100 bytes"),
        (
            ScanLimits(text_bytes=100),
            layer(pax([("SCHILY.xattr.user.x", "v" * 100)]) + file(b"f")),
            "100 bytes",
        ),
        (ScanLimits(view_bytes=1 << 20), layer(header(b"f", size=1 << 20)), "declares"),
        (
            ScanLimits(inline_bytes=1000),
            layer(sparse_pax("1.0", b"s", [(1, b"x" * 2000)], 3000)),
            "metadata",
        ),
        (
            ScanLimits(sparse_pieces=3),
            layer(*[sparse_pax("0.1", b"s", [(0, b"x"), (2, b"y")], 9)] * 2),
            "3 pieces",
        ),
        (
            ScanLimits(steps=100),
            layer(*[file(b"a/" * 40 + b"%d/x" % n) for n in range(3)]),
            "too deep",
        ),
    ],
)
def test_each_limit_is_held(limits: ScanLimits, plain: bytes, word: str) -> None:
    with pytest.raises(RefusedError, match=word):
        scan(plain, limits=limits)


def test_symlinks_that_multiply_the_walk_are_refused_in_time() -> None:
    farm = [symlink(b"l%d" % n, b"././././././././././././././l%d" % (n + 1)) for n in range(254)]
    entries = [file(b"l0/d%d/x" % n) for n in range(20_000)]
    began = time.monotonic()
    with pytest.raises(RefusedError, match=r"too many symlinks|too deep"):
        scan(layer(*farm, *entries), limits=ScanLimits(steps=2_000_000))
    assert time.monotonic() - began < 20


def test_a_long_chain_of_links_to_later_entries_is_settled_in_time() -> None:
    count = 20_000
    links = [hardlink(b"l%d" % n, b"l%d" % (n + 1)) for n in range(count)]
    began = time.monotonic()
    tree = scan(layer(*links, file(b"l%d" % count, b"x")))
    assert tree.root.children[b"l0"].nlink == count + 1
    assert time.monotonic() - began < 20


def test_directories_as_deep_as_a_path_allows_are_taken() -> None:
    deep = b"/".join([b"d"] * 2047)
    tree = scan(layer(pax([("path", deep)]) + directory(b"x")))
    assert tree.needs_chain
    assert sum(1 for _ in tree.walk()) == 2048


def test_data_of_ordinary_files_is_not_kept() -> None:
    scanner = TarScanner()
    scanner.feed(header(b"big", size=1 << 39))
    piece = memoryview(bytes(1 << 20))
    for _ in range(1000):
        scanner.feed(piece)
    with pytest.raises(RefusedError, match="before its data do"):
        scanner.finish()


def test_an_unpadded_tail_of_a_file_too_large_for_a_table_is_refused_by_name() -> None:
    scanner = TarScanner(ScanLimits(inline_bytes=4096))
    scanner.feed(header(b"big", size=(1 << 20) + 1) + bytes((1 << 20) + 1))
    with pytest.raises(RefusedError, match=r"big.*huge file"):
        scanner.finish()


PLAINS = [
    plain
    for case in (*in_one_layer(), *of_several_layers())
    for plain in case.layers
    if len(plain) < 1 << 20
]


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_headers_with_any_change_are_taken_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    plain = bytearray(chance.choice(PLAINS))
    for _ in range(chance.randrange(1, 4)):
        if len(plain) < 512:
            break
        start = chance.randrange(len(plain) // 512) * 512
        block = plain[start : start + 512]
        field = chance.choice([0, 100, 108, 116, 124, 136, 156, 157, 257, 329, 345, 386, 482])
        block[field : field + chance.randrange(1, 13)] = chance.randbytes(chance.randrange(1, 13))
        block = block[:512].ljust(512, b"\0")
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        plain[start : start + 512] = block
    try:
        tree = scan(bytes(plain))
    except RefusedError as error:
        assert str(error).startswith("tar:")
    else:
        assert tree.view_bytes == len(plain)


def test_checksums_of_old_suns_count() -> None:
    name = b"\xe9\xe8"
    signed = bytearray(header(name, size=1))
    signed[148:156] = b" " * 8
    signed[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in signed)
    tree = scan(layer(bytes(signed) + padded(b"x")))
    assert name in tree.root.children
