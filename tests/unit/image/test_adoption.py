"""A foreign index is what one made here would be, or is refused with its reason: never worse."""

from __future__ import annotations

import stat
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.content import Digest
from snapshotter.errors import RefusedError
from snapshotter.image import adoption
from snapshotter.image import erofs_format as fmt
from snapshotter.image import index_layout as layout
from snapshotter.image.adopting import adopt_file
from snapshotter.image.adoption import Claim, adopt
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import IndexLimits
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import TarLayerScanner, device_tag
from snapshotter.image.tree import Inode, Kind, LayerTree, Segment, finish_tree
from tests.cases.layers import in_one_layer
from tests.cases.stacks import of_several_layers
from tests.cases.tars import directory, file, layer
from tests.layerstack import scan
from tests.unit.image.layers import SMALL, frames, index_of, member, text

PLAINS = [plain for case in (*in_one_layer(), *of_several_layers()) for plain in case.layers]
PLAIN = layer(
    directory(b"d"), file(b"d/f", b"x" * 700), file(b"d/g", text(90_000)), file(b"d/.wh.gone", b"")
)
BLOB = member(PLAIN, memory_level=4)


def made(blob: bytes, plain: bytes, folder: Path) -> LayerIndex:
    return index_of(blob, plain, folder, scanner=TarLayerScanner(ScanLimits()))


def claim_of(index: LayerIndex) -> Claim:
    return Claim(
        index.layer, index.diff_id, index.blob_bytes, index.windows_bytes, SMALL.chunk_bytes
    )


def forged(index: LayerIndex, body: bytes, **header: Any) -> bytes:
    """With right checksums, as whoever makes an index can have them."""
    old = layout.unpack_header(index.data, "old")
    return replace(old, body_digest=blake3(body).digest(), **header).pack() + body


def with_image(index: LayerIndex, image: bytes) -> bytes:
    header = layout.unpack_header(index.data, "old")
    tables = bytes(index.data[layout.HEADER_BYTES : header.erofs_offset])
    return forged(index, tables + image, erofs_bytes=len(image))


def with_tree(index: LayerIndex, change: Callable[[Inode], object]) -> bytes:
    tree = scan(PLAIN)
    change(tree.root)
    again = finish_tree(tree.root, view_bytes=len(PLAIN), entries=tree.entries)
    return with_image(index, image_of(index, again))


def image_of(index: LayerIndex, tree: LayerTree) -> bytes:
    return write_erofs(tree, device_bytes=index.view_bytes, device_tag=device_tag(index.diff_id))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> LayerIndex:
    return made(BLOB, PLAIN, tmp_path_factory.mktemp("index"))


def taken(data: bytes, index: LayerIndex, limits: IndexLimits | None = None) -> bytes:
    return bytes(adopt(data, claim_of(index), where="given.idx", limits=limits))


@pytest.mark.parametrize("plain", PLAINS, ids=range(len(PLAINS)))
def test_what_is_made_here_is_taken_as_it_is(plain: bytes, tmp_path: Path) -> None:
    for blob in (plain, member(plain), frames(plain, 30_000)):
        index = made(blob, plain, tmp_path)
        data = bytes(index.data)
        assert taken(data, index) == data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": Digest("sha256", "0" * 64)}, "made for the layer sha256:"),
        ({"diff_id": Digest("sha256", "0" * 64)}, "made for the diffID sha256:"),
        ({"blob_bytes": 17}, f"the length of the layer {len(BLOB)}, not 17"),
        ({"windows_bytes": 0}, "the length of the windows"),
        ({"chunk_bytes": 65536}, "the chunk length 4096, not 65536"),
    ],
)
def test_an_index_for_something_else_is_refused(
    index: LayerIndex, change: dict[str, Any], words: str
) -> None:
    claim = replace(claim_of(index), **change)
    with pytest.raises(RefusedError, match=rf"given\.idx: .*{words}"):
        adopt(index.data, claim, where="given.idx")


def written_otherwise(index: LayerIndex) -> bytes:
    image = bytearray(index.erofs)
    at = fmt.SUPERBLOCK_AT
    image[at + 48 : at + 64] = b"another's uuid!!"
    image[at + 4 : at + 8] = bytes(4)
    crc = fmt.checksum(bytes(image[at : at + 512]))
    image[at + 4 : at + 8] = crc.to_bytes(4, "little")
    assert bytes(image) != bytes(index.erofs)
    return with_image(index, bytes(image))


def test_an_image_that_is_valid_and_written_otherwise_is_written_anew(index: LayerIndex) -> None:
    assert taken(written_otherwise(index), index) == bytes(index.data)


def add(name: bytes, inode: Inode) -> Callable[[Inode], object]:
    return lambda root: root.children.update({name: inode})


def odd_whiteout(root: Inode) -> None:
    root.children[b"w"] = Inode(Kind.WHITEOUT)
    root.children[b"w"].xattrs = {b"security.x": b"y"}


def shared_whiteout(root: Inode) -> None:
    root.children[b"w"] = root.children[b"v"] = Inode(Kind.WHITEOUT)


def odd_link(root: Inode) -> None:
    inode = root.children[b"l"] = Inode(Kind.SYMLINK, 0o644)
    inode.target, inode.size = b"there", 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add(b"s", Inode(Kind.SOCKET, 0o600)), "'s' is a socket"),
        (add(b".wh.s", Inode(Kind.FILE, 0o600)), "the name '.wh.s', which hides"),
        (add(b"n", Inode(Kind.FILE, 0o600, uid=0xFFFFFFFF)), "'n' belongs to nobody"),
        (odd_whiteout, "'w' is a whiteout with xattrs"),
        (shared_whiteout, "is a whiteout with xattrs or of several names"),
        (odd_link, "'l' is a symlink of mode 644"),
        (lambda root: root.children[b"d"].children.clear(), "whether it depends on the layers"),
    ],
)
def test_what_no_scan_gives_is_refused(
    index: LayerIndex, change: Callable[[Inode], object], words: str
) -> None:
    with pytest.raises(RefusedError, match=rf"given\.idx: .*{words}"):
        taken(with_tree(index, change), index)


def test_more_than_a_scan_may_give_is_refused(index: LayerIndex) -> None:
    data = bytes(index.data)
    for scan_limits, words in (
        (ScanLimits(inodes=2), "inodes, at most 2"),
        (ScanLimits(text_bytes=3), "more than 3 bytes of names"),
        (ScanLimits(view_bytes=1 << 16), "a view of"),
    ):
        with pytest.raises(RefusedError, match=words):
            taken(data, index, IndexLimits(scan=scan_limits))
    with pytest.raises(RefusedError, match="bomb"):
        taken(data, index, IndexLimits(bomb_floor_bytes=1, max_ratio=1))
    header = layout.unpack_header(data, "old")
    body = data[layout.HEADER_BYTES :]
    with pytest.raises(RefusedError, match="4096 entries in"):
        taken(forged(index, body, entry_count=4096), index)
    with pytest.raises(RefusedError, match="do not lie as far apart"):
        taken(forged(index, body, longest_run_bytes=header.longest_run_bytes - 1), index)


def test_the_image_of_another_view_is_refused(index: LayerIndex) -> None:
    image = write_erofs(scan(PLAIN), device_bytes=index.view_bytes, device_tag=b"other")
    with pytest.raises(RefusedError, match="another view"):
        taken(with_image(index, image), index)
    image = write_erofs(scan(PLAIN), device_bytes=512, device_tag=device_tag(index.diff_id))
    with pytest.raises(RefusedError, match="made for a view of 1 blocks"):
        taken(with_image(index, image), index)


def carried(pieces: int) -> Inode:
    """A file of which every second block is carried in the image, all in the very same place."""
    inode = Inode(Kind.FILE, 0o644)
    inode.size = 1024 * pieces
    inode.segments = tuple(Segment(1024 * n, 512, -1, b"i" * 512) for n in range(pieces))
    return inode


def test_parts_that_lie_over_each_other_are_refused_before_they_fill_memory(
    index: LayerIndex,
) -> None:
    data = with_tree(index, add(b"huge", carried(400)))
    assert taken(data, index) == data
    image = data[layout.unpack_header(data, "new").erofs_offset :]
    hole, again = fmt.CHUNK_INDEX.pack(0, 0, fmt.HOLE), fmt.CHUNK_INDEX.pack(0, 0, 1)
    assert image.count(hole) == 400
    with pytest.raises(RefusedError, match="parts of the image lie over each other"):
        taken(with_image(index, image.replace(hole, again)), index)


def test_an_xattr_that_many_share_is_read_once(index: LayerIndex) -> None:
    def shared(root: Inode) -> None:
        for number in range(500):
            inode = root.children[b"x%d" % number] = Inode(Kind.FILE, 0o644)
            inode.xattrs = {b"user.long": b"v" * 60_000}

    data = with_tree(index, shared)
    assert len(data) < 200_000
    tracemalloc.start()
    try:
        assert taken(data, index) == data
        with pytest.raises(RefusedError, match="bytes of names, links and xattrs"):
            taken(data, index, IndexLimits(scan=ScanLimits(text_bytes=1 << 20)))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 1 << 20), value=st.binary(min_size=1, max_size=12))
def test_any_forged_body_is_refused_or_harmless(index: LayerIndex, at: int, value: bytes) -> None:
    body = bytearray(index.data[layout.HEADER_BYTES :])
    at %= len(body) - len(value)
    body[at : at + len(value)] = value
    try:
        data = taken(forged(index, bytes(body)), index)
    except RefusedError as error:
        assert str(error).startswith("given.idx")
        return
    again = LayerIndex(memoryview(data), None, where="taken.idx")
    tree = ErofsReader(again.erofs, device_bytes=len(PLAIN)).validated_tree()
    for _, inode in tree.walk():
        assert all(s.view_offset + s.length <= len(PLAIN) for s in inode.segments)


def test_every_flipped_bit_of_the_image_is_refused_or_written_anew(index: LayerIndex) -> None:
    header = layout.unpack_header(index.data, "old")
    body = bytes(index.data[layout.HEADER_BYTES :])
    begin = header.erofs_offset - layout.HEADER_BYTES
    refused = 0
    for at in range(begin, len(body), 3):
        flipped = bytearray(body)
        flipped[at] ^= 1 << at % 8
        try:
            data = taken(forged(index, bytes(flipped)), index)
        except RefusedError as error:
            assert str(error).startswith("given.idx")
            refused += 1
        else:
            image = LayerIndex(memoryview(data), None, where="taken.idx").erofs
            ErofsReader(image).validated_tree()
    assert refused > 200


def test_an_image_cut_anywhere_is_refused(index: LayerIndex) -> None:
    image = bytes(index.erofs)
    for end in range(len(image)):
        with pytest.raises(RefusedError, match=r"given\.idx"):
            taken(with_image(index, image[:end]), index)


def test_what_is_too_long_to_be_an_index_is_not_looked_at(
    index: LayerIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "INDEX_BYTES", len(index.data) - 1)
    with pytest.raises(RefusedError, match="and no index has over"):
        taken(bytes(index.data), index)


@pytest.mark.parametrize("small_bytes", [0, 1 << 30], ids=["apart", "in a thread"])
async def test_a_file_is_taken_as_it_is_or_replaced_or_refused(
    index: LayerIndex, tmp_path: Path, small_bytes: int
) -> None:
    path, claim = tmp_path / "taken.idx", claim_of(index)
    path.write_bytes(index.data)
    before = path.stat().st_ino
    await adopt_file(path, claim, small_bytes=small_bytes)
    assert path.stat().st_ino == before

    path.write_bytes(written_otherwise(index))
    await adopt_file(path, claim, small_bytes=small_bytes)
    assert path.read_bytes() == bytes(index.data)

    path.write_bytes(with_tree(index, add(b"s", Inode(Kind.SOCKET, stat.S_IRWXU))))
    with pytest.raises(RefusedError, match=r"taken\.idx: the entry 's' is a socket"):
        await adopt_file(path, claim, small_bytes=small_bytes)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken.idx"]
