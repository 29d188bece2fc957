"""Every handmade layer, mounted by the kernel as EROFS over its tar and stacked by overlayfs."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest

from ioengine.mounts import mount_erofs, unmount
from snapshotter.image.chain import adapt
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.lower import DirectoryLayer, TreeLayer
from snapshotter.image.tar import TarScanner
from snapshotter.image.tree import LayerTree
from tests.cases.layers import in_one_layer
from tests.cases.rows import LayerCase
from tests.cases.stacks import of_several_layers
from tests.cases.tars import directory, file, header, layer
from tests.layerstack import layer_root, mounted, scan, stack_of
from tests.treecheck import compare, directory_sizes, walk

CASES = [*in_one_layer(), *of_several_layers()]


@pytest.mark.root
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mounted_layer_shows_what_is_written_down(case: LayerCase, tmp_path: Path) -> None:
    with mounted(case.layers, tmp_path) as root:
        rows = walk(root)
    assert compare(case.rows, rows, (directory_sizes,)) == []


@pytest.mark.root
@pytest.mark.parametrize("case", of_several_layers(), ids=lambda case: case.name)
def test_a_directory_below_counts_like_the_image_it_shows(case: LayerCase, tmp_path: Path) -> None:
    """Plain overlay layers and EROFS ones give the same answers to the layer above."""
    with mounted(case.layers, tmp_path):
        below = [
            DirectoryLayer(layer_root(tmp_path / str(number))) for number in range(len(case.layers))
        ]
        layers = stack_of(case.layers)
        for number, plain in enumerate(case.layers):
            tree = scan(plain)
            by_directory = adapt(tree, below[:number])
            by_tree = adapt(tree, [TreeLayer(layer.tree) for layer in layers[:number]])
            assert _described(by_directory) == _described(by_tree)


def _described(tree: LayerTree | None) -> list[object]:
    if tree is None:
        return []
    return [
        (path, repr(inode), inode.opaque, inode.xattrs, inode.mtime_ns)
        for path, inode in tree.walk()
    ]


@pytest.mark.root
def test_files_over_4_gib_and_what_lies_behind_them_are_read_right(tmp_path: Path) -> None:
    size = (5 << 30) + 700
    head, behind = header(b"big", size=size), layer(file(b"behind", b"found"))
    scanner = TarScanner()
    scanner.feed(head)
    piece = memoryview(bytes(1 << 20))
    for _ in range(size >> 20):
        scanner.feed(piece)
    rest = bytes(-(-size // 512) * 512 - (size >> 20 << 20))
    scanner.feed(rest + behind)
    tree = scanner.finish()
    view = tmp_path / "view"
    with view.open("wb") as file_:
        file_.write(head)
        for offset in (0, (4 << 30) - 3, (4 << 30) + 5, size - 4):
            file_.seek(len(head) + offset)
            file_.write(b"mark")
        file_.seek(tree.view_bytes - len(behind))
        file_.write(behind)
    metadata = tmp_path / "metadata"
    metadata.write_bytes(write_erofs(tree, device_bytes=tree.view_bytes, device_tag=b"big"))
    target = tmp_path / "target"
    target.mkdir()
    mount_erofs(metadata, target, [view])
    root = layer_root(target)
    try:
        assert (root / "behind").read_bytes() == b"found"
        assert (root / "big").stat().st_size == size
        with (root / "big").open("rb") as big:
            for offset in (0, (4 << 30) - 3, (4 << 30) + 5, size - 4):
                big.seek(offset - 1 if offset else 0)
                around = big.read(6)
                assert around == (b"\0mark\0" if 0 < offset < size - 4 else around)
                assert b"mark" in around
    finally:
        unmount(target, detach=True)


@pytest.mark.root
def test_200_000_entries_in_one_directory_are_scanned_in_seconds_and_all_found(
    tmp_path: Path,
) -> None:
    names = [b"%06d-%d" % (n, n * 7919 % 1000) for n in range(200_000)]
    plain = layer(directory(b"big"), *[header(b"big/" + name) for name in names])
    began = time.monotonic()
    tree = scan(plain)
    image = write_erofs(tree, device_bytes=len(plain), device_tag=b"many")
    assert time.monotonic() - began < 60
    view, metadata, target = tmp_path / "view", tmp_path / "metadata", tmp_path / "target"
    view.write_bytes(plain)
    metadata.write_bytes(image)
    target.mkdir()
    mount_erofs(metadata, target, [view])
    root = layer_root(target)
    try:
        listed = os.listdir(os.fsencode(root / "big"))  # noqa: PTH208 (bytes)
        assert sorted(listed) == names
        for name in names[::1999]:
            assert (root / "big" / os.fsdecode(name)).stat().st_size == 0
        assert not (root / "big/000000").exists()
    finally:
        unmount(target, detach=True)


@pytest.mark.root
def test_a_mapped_file_ends_in_zeros_even_where_the_tar_does_not_pad_with_them(
    tmp_path: Path,
) -> None:
    plain = header(b"f", size=700) + b"e" * 700 + b"\xaa" * 324 + header(b"g") + bytes(1024)
    with mounted([plain], tmp_path) as root, (root / "f").open("rb") as file_:
        assert mapped_page(file_.fileno()) == b"e" * 700 + bytes(4096 - 700)


def mapped_page(descriptor: int) -> bytes:
    """A file's first page as a mapping shows it, behind its end too (mmap.mmap stops there)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    place = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mmap.argtypes = (*place, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = place
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    page = ctypes.string_at(address, 4096)
    libc.munmap(address, 4096)
    return page
