"""The EROFS writer and its reader, joined in memory; and what the reader refuses to believe."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotter.errors import RefusedError
from snapshotter.image import erofs_format as fmt
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.tree import Inode, Kind, LayerTree, Segment, finish_tree
from tests.cases.layers import in_one_layer
from tests.cases.sparse import sparse_pax
from tests.cases.stacks import of_several_layers
from tests.cases.tars import MTIME, directory, file, layer
from tests.layerstack import content, scan

PLAINS = [plain for case in (*in_one_layer(), *of_several_layers()) for plain in case.layers]
SMALL = layer(directory(b"d"), file(b"d/f", b"x" * 700), file(b"d/g", b"y", mtime=MTIME + 1))


def image_of(plain: bytes) -> bytes:
    return write_erofs(scan(plain), device_bytes=len(plain), device_tag=b"sha256:test")


FIELDS = ("mtime_ns", "rdev", "target", "xattrs", "nlink", "segments", "implied", "opaque")


def described(tree: LayerTree) -> list[object]:
    return [
        (path, repr(inode), *(getattr(inode, field) for field in FIELDS))
        for path, inode in tree.walk()
    ]


@pytest.mark.parametrize("plain", PLAINS, ids=range(len(PLAINS)))
def test_what_was_written_is_read_again(plain: bytes) -> None:
    tree = scan(plain)
    image = write_erofs(tree, device_bytes=len(plain), device_tag=b"sha256:test")
    reader = ErofsReader(memoryview(image), device_bytes=len(plain))
    assert described(reader.validated_tree()) == described(tree)
    assert reader.superblock.device_tag == b"sha256:test"
    assert len(image) % 512 == 0


@given(st.dictionaries(st.binary(min_size=1, max_size=40), st.integers(0, 1), max_size=200))
@settings(max_examples=60, deadline=None)
def test_directories_of_any_names_are_read_again(names: dict[bytes, int]) -> None:
    root = Inode(Kind.DIR, 0o755)
    for name, is_directory in names.items():
        if b"/" not in name and b"\0" not in name and name not in (b".", b".."):
            root.children[name] = Inode(Kind.DIR if is_directory else Kind.FIFO, 0o600)
    tree = finish_tree(root, view_bytes=0, entries=0)
    reader = ErofsReader(memoryview(write_erofs(tree, device_bytes=0, device_tag=b"")))
    assert described(reader.validated_tree()) == described(tree)
    for name, inode in root.children.items():
        found = reader.lookup((name,))
        assert found is not None
        assert found.kind is inode.kind
    assert reader.lookup((b"no such name",)) is None or b"no such name" in root.children
    assert reader.lookup((b"a", b"b", b"c")) is None


def test_a_changed_bit_is_refused_or_seen_and_never_crashes() -> None:
    image = image_of(PLAINS[0])
    tree = described(ErofsReader(memoryview(image)).tree())
    chance = random.Random(20231114)
    unseen = 0
    for _ in range(3000):
        bit = chance.randrange(len(image) * 8)
        broken = bytearray(image)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            found = described(ErofsReader(memoryview(broken)).validated_tree())
        except RefusedError:
            continue
        unseen += found == tree
    assert unseen == 0


def test_an_image_cut_anywhere_is_refused() -> None:
    image = image_of(SMALL)
    for end in range(len(image)):
        with pytest.raises(RefusedError):
            ErofsReader(memoryview(image)[:end]).tree()


def test_an_image_of_noise_is_refused() -> None:
    chance = random.Random(4)
    for _ in range(200):
        noise = bytearray(image_of(SMALL))
        start = chance.randrange(fmt.FIRST_INODE_AT, len(noise))
        noise[start : start + 64] = chance.randbytes(min(64, len(noise) - start))
        with pytest.raises(RefusedError):
            ErofsReader(memoryview(noise)).validated_tree()


def test_an_image_made_for_another_view_is_refused() -> None:
    with pytest.raises(RefusedError, match="view of"):
        ErofsReader(memoryview(image_of(SMALL)), device_bytes=len(SMALL) + 512)


def forged(change: Callable[[Inode], None]) -> bytes:
    """An image whose tree was changed to what the scanner would never give."""
    tree = scan(SMALL)
    change(tree.root)
    return write_erofs(tree, device_bytes=len(SMALL), device_tag=b"")


def _xattr(name: bytes, value: bytes) -> Callable[[Inode], None]:
    def change(root: Inode) -> None:
        root.children[b"d"].children[b"f"].xattrs = {name: value}

    return change


def _beyond_the_view(root: Inode) -> None:
    root.children[b"d"].children[b"f"].segments = (Segment(0, 700, 1 << 20),)


def _a_name_with_a_slash(root: Inode) -> None:
    root.children[b"a/b"] = Inode(Kind.FIFO)


def _two_parents(root: Inode) -> None:
    root.children[b"e"] = Inode(Kind.DIR)
    root.children[b"e"].children[b"again"] = root.children[b"d"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_xattr(b"trusted.overlay.redirect", b"/etc"), "redirect"),
        (_xattr(b"trusted.overlay.opaque", b"y"), "opaque"),
        (_xattr(b"security.capability", b"junk"), "capability"),
        (_beyond_the_view, "outside of the view"),
        (_a_name_with_a_slash, "has the name"),
        (_two_parents, "two names"),
    ],
)
def test_what_an_image_may_not_say_is_refused(change: Callable[[Inode], None], word: str) -> None:
    with pytest.raises(RefusedError, match=word):
        ErofsReader(memoryview(forged(change))).tree()


def test_many_equal_xattrs_are_kept_once() -> None:
    root = Inode(Kind.DIR, 0o755)
    for number in range(100):
        inode = root.children[b"%d" % number] = Inode(Kind.FILE, 0o644)
        inode.xattrs = {b"security.selinux": b"system_u:object_r:container_file_t:s0" * 3}
    tree = finish_tree(root, view_bytes=0, entries=100)
    image = write_erofs(tree, device_bytes=0, device_tag=b"")
    assert len(image) < 100 * 110
    assert described(ErofsReader(memoryview(image)).validated_tree()) == described(tree)


def test_an_entry_costs_at_most_110_bytes() -> None:
    names = [b"usr/share/doc/some-package-%d/changelog" % (n // 9) for n in range(3000)]
    parts = [
        directory(b"usr/share/doc/some-package-%d" % (n // 9), mtime=MTIME + n)
        + file(name + b"-%d" % n, b"x" * (n % 1000), mtime=MTIME + n)
        for n, name in enumerate(names)
    ]
    plain = layer(*parts)
    tree = scan(plain)
    image = write_erofs(tree, device_bytes=len(plain), device_tag=b"")
    files = sum(1 for _ in tree.walk())
    assert len(image) <= 110 * files


def test_bytes_scattered_over_a_huge_file_cost_little() -> None:
    pieces = [(1 << 39, b"h" * 512), (1 << 40, b"tail")]
    plain = layer(sparse_pax("1.0", b"huge", pieces, (1 << 40) + 4))
    tree = scan(plain)
    image = write_erofs(tree, device_bytes=len(plain), device_tag=b"")
    inode = ErofsReader(memoryview(image)).tree().root.children[b"huge"]
    assert inode.size == (1 << 40) + 4
    found = {s.file_offset: s for s in inode.segments}
    assert len(image) < 32 << 20
    data = b"".join(s.inline or plain[s.view_offset :][: s.length] for s in found.values())
    assert data.strip(b"\0") == b"h" * 512 + data.strip(b"\0")[512:-4] + b"tail"


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_sparse_files_of_any_shape_read_as_they_should(data: st.DataObject) -> None:
    at = 0
    pieces: list[tuple[int, bytes]] = []
    for _ in range(data.draw(st.integers(0, 8))):
        at += data.draw(st.sampled_from([0, 1, 512, 513, 4096, 70_000]))
        length = data.draw(st.sampled_from([0, 1, 100, 512, 1024, 5000, 66_000]))
        pieces.append((at, bytes([len(pieces) + 1]) * length))
        at += length
    size = at + data.draw(st.sampled_from([0, 1, 512, 100_000]))
    expected = bytearray(size)
    for offset, piece in pieces:
        expected[offset : offset + len(piece)] = piece
    plain = layer(sparse_pax("1.0", b"s", pieces, size))
    image = image_of(plain)
    inode = ErofsReader(memoryview(image)).validated_tree().root.children[b"s"]
    assert content(inode, plain) == bytes(expected)
