"""Reads EROFS metadata images as write_erofs makes them, and believes nothing of them.

Every offset, count, name and address is checked before it is used; what the writer would never
have written is refused, so an accepted image holds nothing that the kernel could read otherwise.
Pure: works on a buffer (an mmap will do) and opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from snapshotter.errors import RefusedError
from snapshotter.image import erofs_format as fmt
from snapshotter.image.erofs_dirs import DirectoryEntry, block_entries, find_entry
from snapshotter.image.erofs_inodes import InodeParser, RawInode
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.tree import BLOCK_BYTES, Inode, Kind, LayerTree, finish_tree

Path = tuple[bytes, ...]


class Superblock(NamedTuple):
    """What the superblock and the one device slot say."""

    root_nid: int
    inodes: int
    epoch_ns: int
    view_block: int
    """First block of the view in the unified address space; also the image's own block count."""
    xattr_at: int
    device_blocks: int
    device_tag: bytes


class ErofsReader:
    """One image. ``find`` and ``lookup`` read what they pass, ``tree`` reads everything.

    All raise RefusedError at the first thing that is wrong. ``device_bytes``, if given, is the
    length of the view that the image must be for.
    """

    def __init__(
        self, image: memoryview, *, device_bytes: int | None = None, entries: int = 0
    ) -> None:
        self._image = image.cast("B") if image.format != "B" else image
        self._entries = entries
        self.superblock = _read_superblock(self._image)
        blocks = self.superblock.device_blocks
        if device_bytes is not None and device_bytes // BLOCK_BYTES != blocks:
            _refuse(f"made for a view of {blocks} blocks, not of {device_bytes} bytes")
        self._inodes = InodeParser(
            self._image,
            epoch_ns=self.superblock.epoch_ns,
            view_block=self.superblock.view_block,
            device_blocks=blocks,
            xattr_at=self.superblock.xattr_at,
        )

    def root(self) -> RawInode:
        """The layer's root directory, to go on from with ``find``."""
        outer = self._directory_at(self.superblock.root_nid)
        layer = self.find(outer, fmt.LAYER_NAME)
        if layer is None or layer.kind is not Kind.DIR:
            _refuse(f"no directory {fmt.LAYER_NAME!r} in its root")
        return layer

    def find(self, directory: RawInode, name: bytes) -> RawInode | None:
        """What ``name`` is in a directory; None if it is not there (or that is no directory)."""
        if directory.kind is not Kind.DIR:
            return None
        entry = find_entry(self._inodes.data(directory), name)
        return None if entry is None else self._child(entry)

    def inode(self, raw: RawInode) -> Inode:
        """All that an inode says, but without children."""
        return self._inodes.inode(raw)

    def names(self, directory: RawInode) -> list[bytes]:
        """The names in a directory; empty if it is none."""
        if directory.kind is not Kind.DIR:
            return []
        entries = block_entries(self._inodes.data(directory))
        return [entry.name for entry in entries if entry.name not in (b".", b"..")]

    def lookup(self, path: Path) -> Inode | None:
        """The inode of a path (no symlink is followed), without children; None if absent."""
        raw: RawInode | None = self.root()
        for name in path:
            raw = self.find(raw, name) if raw else None
        return self._inodes.inode(raw) if raw else None

    def tree(self) -> LayerTree:
        """The whole tree, every part of the image that it leads to checked.

        Costs no more than the image is long: no two parts of it may lie over each other.
        """
        self._inodes.room_bytes = len(self._image)
        try:
            return self._tree()
        finally:
            self._inodes.room_bytes = math.inf

    def _tree(self) -> LayerTree:
        root_nid = self.superblock.root_nid
        root = self._inodes.inode(self._directory_at(root_nid))
        seen: dict[int, Inode] = {root_nid: root}
        links: dict[int, int] = {root_nid: root.nlink}
        stack = [(root, root_nid, root_nid)]
        while stack:
            directory, nid, parent_nid = stack.pop()
            raw = self._directory_at(nid)
            for entry in self._checked_entries(raw, nid, parent_nid):
                child = seen.get(entry.nid)
                if child is None:
                    if len(seen) >= self.superblock.inodes:
                        _refuse("more inodes than the superblock counts")
                    child = self._inode_of(entry)
                    seen[entry.nid] = child
                    links[entry.nid] = child.nlink
                    if child.kind is Kind.DIR:
                        stack.append((child, entry.nid, nid))
                elif child.kind is Kind.DIR:
                    _refuse(f"the directory at inode {entry.nid} has two names")
                else:
                    self._child(entry)
                directory.children[entry.name] = child
        if len(seen) != self.superblock.inodes:
            _refuse(f"{self.superblock.inodes} inodes promised, {len(seen)} found")
        view_bytes = self.superblock.device_blocks * BLOCK_BYTES
        layer = root.children.get(fmt.LAYER_NAME)
        if layer is None or layer.kind is not Kind.DIR or len(root.children) != 1:
            _refuse(f"its root holds something else than the directory {fmt.LAYER_NAME!r}")
        root.nlink = 3
        tree = finish_tree(layer, view_bytes=view_bytes, entries=self._entries)
        for nid, inode in seen.items():
            if links[nid] != inode.nlink:
                _refuse(f"inode {nid} counts {links[nid]} links and has {inode.nlink}")
        return tree

    def validated_tree(self) -> LayerTree:
        """The whole tree, if the image is to the byte what write_erofs makes of it.

        So nothing hides in reserved fields, gaps or unused blocks. For images of other origin.
        """
        tree = self.tree()
        if self.rewritten(tree) != self._image:
            _refuse("it is not what this version would write for its own tree")
        return tree

    def rewritten(self, tree: LayerTree) -> bytes:
        """What write_erofs makes of ``tree``, read from this image."""
        tag = self.superblock.device_tag
        return write_erofs(tree, device_bytes=tree.view_bytes, device_tag=tag)

    def _directory_at(self, nid: int) -> RawInode:
        raw = self._inodes.raw(nid)
        if raw.kind is not Kind.DIR:
            _refuse(f"inode {nid} is no directory")
        return raw

    def _inode_of(self, entry: DirectoryEntry) -> Inode:
        if entry.file_type == Kind.FILE:
            whole = self._inodes.whole_file(entry.nid)
            if whole is not None:
                return whole
        return self._inodes.inode(self._child(entry))

    def _child(self, entry: DirectoryEntry) -> RawInode:
        raw = self._inodes.raw(entry.nid)
        if raw.kind != entry.file_type:
            _refuse(f"the name {entry.name!r} has the type {entry.file_type}, its inode another")
        return raw

    def _checked_entries(
        self, raw: RawInode, nid: int, parent_nid: int
    ) -> Iterator[DirectoryEntry]:
        """All entries but ``.`` and ``..``, which must be there and lead where they should."""
        dots = {b".": nid, b"..": parent_nid}
        last = b""
        for entry in block_entries(self._inodes.data(raw)):
            if entry.name <= last:
                _refuse(f"the directory at inode {nid} is not sorted")
            last = entry.name
            if entry.name in dots:
                if entry.nid != dots.pop(entry.name) or entry.file_type != Kind.DIR:
                    _refuse(f"{entry.name!r} of the directory at inode {nid} leads elsewhere")
            else:
                yield entry
        if dots:
            _refuse(f"the directory at inode {nid} lacks . or ..")


def _refuse(fault: str) -> NoReturn:
    raise RefusedError(f"EROFS image: {fault}")


def _read_superblock(image: memoryview) -> Superblock:
    if len(image) < fmt.FIRST_INODE_AT or len(image) % BLOCK_BYTES:
        _refuse(f"{len(image)} bytes are no whole image")
    (
        magic, crc, compat, block_bits, extslots, root_nid, inodes, epoch, nsec, blocks,
        meta_block, xattr_block, _uuid, _volume, incompat, compression, devices, slot, dir_bits,
        prefixes, prefix_start, packed, xattr_filter,
    ) = fmt.SUPERBLOCK.unpack_from(image, fmt.SUPERBLOCK_AT)  # fmt: skip
    if magic != fmt.MAGIC:
        _refuse("it has no superblock")
    block = bytearray(image[fmt.SUPERBLOCK_AT : fmt.SUPERBLOCK_AT + BLOCK_BYTES])
    block[4:8] = bytes(4)
    if fmt.checksum(bytes(block)) != crc:
        _refuse("the superblock's checksum is wrong")
    form = (compat, incompat, block_bits, extslots, compression, devices, slot)
    written = (
        fmt.COMPAT_CHECKSUM | fmt.COMPAT_MTIME, fmt.INCOMPAT_CHUNKED | fmt.INCOMPAT_DEVICES,
        fmt.BLOCK_BITS, 0, 0, 1, fmt.DEVICE_AT // fmt.DEVICE_SLOT_BYTES,
    )  # fmt: skip
    if form != written or any((meta_block, dir_bits, prefixes, prefix_start, packed, xattr_filter)):
        _refuse(f"features that are not written here: {form}")
    if blocks * BLOCK_BYTES != len(image) or xattr_block >= blocks or nsec >= 1_000_000_000:
        _refuse("the superblock contradicts the image's length or itself")
    tag, device_blocks, view_block = fmt.DEVICE.unpack_from(image, fmt.DEVICE_AT)
    if view_block != blocks:
        _refuse("the view does not begin behind the image")
    return Superblock(
        root_nid,
        inodes,
        epoch * 1_000_000_000 + nsec,
        view_block,
        xattr_block * BLOCK_BYTES,
        device_blocks,
        tag.rstrip(b"\0"),
    )
