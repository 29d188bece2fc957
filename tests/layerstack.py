"""Layers of plain tar brought together to what a container would see, in memory or mounted.

The way is the product's own: scan, write EROFS, read it back, fit it to the layers below. ``shown``
reads the result without any file system; ``mounted`` lets the kernel do it (needs root).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ioengine.mounts import mount_erofs, unmount
from snapshotter.image.chain import Merged, adapt
from snapshotter.image.erofs_format import LAYER_NAME
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.limits import ScanLimits
from snapshotter.image.lower import ErofsLayer, LowerLayer, TreeLayer
from snapshotter.image.tar import TarScanner
from snapshotter.image.tree import Inode, Kind, LayerTree
from tests.treecheck import Row, Rows

_TYPES = {
    Kind.FILE: "file",
    Kind.DIR: "dir",
    Kind.CHAR: "char",
    Kind.BLOCK: "block",
    Kind.FIFO: "fifo",
    Kind.SOCKET: "socket",
    Kind.SYMLINK: "symlink",
}
_MS_RDONLY = 1


def scan(plain: bytes, *, step: int = 1 << 20, limits: ScanLimits | None = None) -> LayerTree:
    """The tree of a plain layer, fed ``step`` bytes at a time."""
    scanner = TarScanner(limits)
    for at in range(0, len(plain), step):
        scanner.feed(memoryview(plain)[at : at + step])
    return scanner.finish()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer ready to be mounted."""

    plain: bytes
    image: bytes
    tree: LayerTree


def stack_of(plains: Sequence[bytes]) -> list[Layer]:
    """The layers, lowest first, each through its EROFS image and fitted to those below."""
    layers: list[Layer] = []
    below: list[LowerLayer] = []
    for plain in plains:
        image = write_erofs(scan(plain), device_bytes=len(plain), device_tag=b"sha256:test")
        tree = ErofsReader(memoryview(image), device_bytes=len(plain)).validated_tree()
        fitted = adapt(tree, below)
        if fitted is not None:
            image = write_erofs(fitted, device_bytes=len(plain), device_tag=b"sha256:fitted")
            tree = ErofsReader(memoryview(image)).validated_tree()
        below.append(ErofsLayer(ErofsReader(memoryview(image))))
        layers.append(Layer(plain, image, tree))
    return layers


def shown(plains: Sequence[bytes]) -> Rows:
    """What the stack shows, merged and read in memory; whiteouts that stay in sight are ghosts."""
    layers = stack_of(plains)
    plain_of = {id(inode): layer.plain for layer in layers for _, inode in layer.tree.walk()}
    found: dict[str, Inode] = {}
    todo = [("", Merged.of([TreeLayer(layer.tree) for layer in layers]))]
    while todo:
        here, merged = todo.pop()
        for name in {name for layer in merged.layers for name in layer.names()}:
            path = f"{here}/{os.fsdecode(name)}".lstrip("/")
            child = merged.child(name)
            if child is not None:
                found[path] = child.inode
                todo.append((path, child))
            elif len(merged.layers) == 1:
                found[path] = Inode(Kind.WHITEOUT)
    return _rows(found, plain_of)


def _rows(found: Mapping[str, Inode], plain_of: Mapping[int, bytes]) -> Rows:
    rows: Rows = {}
    first: dict[int, str] = {}
    for path in sorted(found, key=os.fsencode):
        inode = found[path]
        if inode.kind is Kind.WHITEOUT:
            rows[path] = Row("ghost")
            continue
        row = Row(_TYPES[inode.kind], inode.mode, inode.uid, inode.gid, inode.mtime_ns)
        row.size = inode.size
        row.rdev = inode.rdev
        row.link = os.fsdecode(inode.target)
        row.xattrs = {os.fsdecode(k): v for k, v in (inode.xattrs or {}).items()}
        if inode.kind is Kind.FILE:
            row.sha256 = hashlib.sha256(content(inode, plain_of[id(inode)])).hexdigest()
        same = first.setdefault(id(inode), path) if inode.kind is not Kind.DIR else path
        row.hardlink_of = "" if same == path else same
        rows[path] = row
    return rows


def content(inode: Inode, plain: bytes) -> bytes:
    """A file's bytes, out of its segments and the view."""
    data = bytearray(inode.size)
    for segment in inode.segments:
        part = segment.inline
        if part is None:
            part = plain[segment.view_offset : segment.view_offset + segment.length]
        assert len(part) == segment.length
        data[segment.file_offset : segment.file_offset + segment.length] = part
    return bytes(data)


def layer_root(target: Path) -> Path:
    """The layer's own root in an image that is mounted at ``target``."""
    return target / os.fsdecode(LAYER_NAME)


@contextlib.contextmanager
def mounted(plains: Sequence[bytes], scratch: Path) -> Iterator[Path]:
    """The stack mounted by the kernel, below ``scratch``; always overlayfs, as of two or more."""
    lower: list[str] = []
    with contextlib.ExitStack() as undo:
        for number, layer in enumerate(stack_of([*plains, bytes(1024)])):
            view, metadata = scratch / f"{number}.view", scratch / f"{number}.erofs"
            view.write_bytes(layer.plain)
            metadata.write_bytes(layer.image)
            target = scratch / f"{number}"
            target.mkdir()
            mount_erofs(metadata, target, [view])
            undo.callback(unmount, target, detach=True)
            lower.insert(0, str(layer_root(target)))
        merged = scratch / "merged"
        merged.mkdir()
        mount_overlay(lower, merged)
        undo.callback(unmount, merged, detach=True)
        yield merged


def mount_overlay(lower: Sequence[str], target: Path) -> None:
    """A read-only overlay of directories, topmost first."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"lowerdir={':'.join(lower)}".encode()
    if libc.mount(b"overlay", os.fsencode(target), b"overlay", _MS_RDONLY, options):
        raise OSError(ctypes.get_errno(), f"overlay on {target} with {options!r}")
