"""A layer's tree as an EROFS metadata image, whose file data lie in the view (device 1).

Pure, and a function of its input: the same tree gives the same bytes. Inodes come first, each
directory's beside each other; then the blocks of directories and long symlinks, what files carry
inline, and shared xattrs. Format: erofs_format.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from snapshotter.errors import RefusedError
from snapshotter.image import erofs_format as fmt
from snapshotter.image.erofs_dirs import directory_blocks, pack_names
from snapshotter.image.erofs_xattrs import XattrTable, icount
from snapshotter.image.tree import BLOCK_BYTES, Inode, Kind, LayerTree

_BILLION = 1_000_000_000
_BLOCKS_MAX = 0xFFFFFFFE
_UINT32 = 1 << 32
_UINT64 = 1 << 64


def write_erofs(tree: LayerTree, *, device_bytes: int, device_tag: bytes) -> bytes:
    """The metadata image of ``tree`` over a view of ``device_bytes``.

    The layer is its directory ``fmt.LAYER_NAME``. ``device_tag`` (at most 64 bytes, a digest by
    custom) names the view in the device table. The result is a whole number of 512-byte blocks.
    RefusedError if the format has no room for it.
    """
    if len(device_tag) > fmt.TAG_BYTES:
        raise RefusedError(f"a device tag of {len(device_tag)} bytes, at most 64 fit")
    return _Writer(tree, device_bytes // BLOCK_BYTES, device_tag).write()


class _Slot(NamedTuple):
    """Where an inode lies, its form, and what stands behind its header."""

    at: int
    compact: bool
    layout: int
    size: int
    xattrs: bytes
    splits: Sequence[int]
    """Of a directory: how many names each of its blocks takes."""


class _Writer:
    def __init__(self, tree: LayerTree, device_blocks: int, device_tag: bytes) -> None:
        self._root = _enclosed(tree.root)
        self._device_blocks = device_blocks
        self._tag = device_tag
        self._order = list(_inodes(self._root))
        self._epoch_ns = _commonest_time(inode for inode, _ in self._order)
        self._xattrs = XattrTable(inode for inode, _ in self._order)
        self._slots: dict[int, _Slot] = {}
        self._end = fmt.FIRST_INODE_AT
        self._gaps: list[tuple[int, int]] = []
        self._data_blocks = 0
        self._next_block = 0
        self._view_block = 0
        self._blocks: list[bytes] = []

    def write(self) -> bytes:
        for inode, _ in self._order:
            self._slots[id(inode)] = self._allocate(inode)
        shared = bytes(self._xattrs.shared)
        self._next_block = _block_count(self._end)
        self._view_block = self._next_block + self._data_blocks + _block_count(len(shared))
        if self._view_block + self._device_blocks > _BLOCKS_MAX:
            raise RefusedError(f"a view of {self._device_blocks} blocks is too large for EROFS")
        image = bytearray(self._next_block * BLOCK_BYTES)
        for number, (inode, parent) in enumerate(self._order, 1):
            self._emit(image, inode, parent, number)
        xattr_block = self._put(shared) if shared else 0
        if self._next_block != self._view_block:
            raise AssertionError("blocks counted and blocks written differ")
        self._emit_superblock(image, xattr_block)
        return b"".join((image, *self._blocks))

    def _allocate(self, inode: Inode) -> _Slot:
        xattrs = self._xattrs.inline(inode)
        kind, layout, size = inode.kind, fmt.LAYOUT_PLAIN, inode.size
        splits: Sequence[int] = ()
        if kind is Kind.DIR:
            splits, size = pack_names(inode.children)
        elif kind is not Kind.FILE and kind is not Kind.SYMLINK:
            size = 0
        compact = (
            (inode.mtime_ns == self._epoch_ns or kind is Kind.WHITEOUT)
            and size < _UINT32
            and inode.uid <= 0xFFFF
            and inode.gid <= 0xFFFF
            and inode.nlink <= 0xFFFF
            and not inode.implied
        )
        header = (fmt.COMPACT.size if compact else fmt.EXTENDED.size) + len(xattrs)
        tail = 0
        if kind is Kind.DIR or kind is Kind.SYMLINK:
            tail = size % BLOCK_BYTES
            if tail and header % fmt.NID_BYTES + tail <= BLOCK_BYTES:
                layout = fmt.LAYOUT_INLINE
                self._data_blocks += size // BLOCK_BYTES
            else:
                tail = 0
                self._data_blocks += _block_count(size)
        elif kind is Kind.FILE and not _is_flat(inode):
            layout = fmt.LAYOUT_CHUNKED
            header = fmt.padded(header, fmt.CHUNK_INDEX.size)
            header += fmt.CHUNK_INDEX.size * _chunk_count(inode, chunk_bits(inode))
            carried = (segment.inline for segment in inode.segments)
            self._data_blocks += sum(_block_count(len(data)) for data in carried if data)
        return _Slot(self._reserve(header, tail), compact, layout, size, xattrs, splits)

    def _reserve(self, header_bytes: int, tail_bytes: int) -> int:
        """Room for an inode; its inline tail must not cross a block's end."""
        total = fmt.padded(header_bytes + tail_bytes, fmt.NID_BYTES)
        if not tail_bytes and self._gaps and total <= self._gaps[-1][1]:
            at, room = self._gaps.pop()
            if room > total:
                self._gaps.append((at + total, room - total))
            return at
        at = self._end
        over = (at + header_bytes) % BLOCK_BYTES + tail_bytes
        if tail_bytes and over > BLOCK_BYTES:
            at += fmt.padded(BLOCK_BYTES - (at + header_bytes) % BLOCK_BYTES, fmt.NID_BYTES)
            self._gaps.append((self._end, at - self._end))
        self._end = at + total
        return at

    def _put(self, data: bytes) -> int:
        """Append whole blocks; the number of their first."""
        start = self._next_block
        count = _block_count(len(data))
        self._blocks.append(data.ljust(count * BLOCK_BYTES, b"\0"))
        self._next_block += count
        return start

    def _emit(self, image: bytearray, inode: Inode, parent: Inode, number: int) -> None:
        slot = self._slots[id(inode)]
        kind = inode.kind
        union, behind = 0, b""
        if kind is Kind.FILE:
            if slot.layout == fmt.LAYOUT_CHUNKED:
                bits = chunk_bits(inode)
                union, behind = fmt.CHUNK_INDEXED | bits, self._chunk_table(inode, bits)
            elif inode.segments:
                union = self._view_block + inode.segments[0].view_offset // BLOCK_BYTES
        elif kind is Kind.DIR:
            union, behind = self._emit_data(slot, self._directory(inode, parent, slot))
        elif kind is Kind.SYMLINK:
            union, behind = self._emit_data(slot, inode.target)
        elif kind is Kind.CHAR or kind is Kind.BLOCK:
            union = fmt.encode_device(*inode.rdev)
        at = slot.at
        mode = fmt.TYPE_BITS[Kind.CHAR if kind is Kind.WHITEOUT else kind] | inode.mode
        form = slot.layout << 1
        count = icount(slot.xattrs)
        if slot.compact:
            fmt.COMPACT.pack_into(
                image, at, form, count, mode, inode.nlink, slot.size, 0, union, number,
                inode.uid, inode.gid, 0,
            )  # fmt: skip
            at += fmt.COMPACT.size
        else:
            seconds, nanoseconds = divmod(inode.mtime_ns, _BILLION)
            fmt.EXTENDED.pack_into(
                image, at, form | 1, count, mode, 0, slot.size, union, number, inode.uid,
                inode.gid, seconds % _UINT64, nanoseconds, inode.nlink,
                fmt.FLAG_IMPLIED if inode.implied else 0,
            )  # fmt: skip
            at += fmt.EXTENDED.size
        if slot.xattrs:
            image[at : at + len(slot.xattrs)] = slot.xattrs
            at += len(slot.xattrs)
        if behind:
            if slot.layout == fmt.LAYOUT_CHUNKED:
                at = fmt.padded(at, fmt.CHUNK_INDEX.size)
            image[at : at + len(behind)] = behind

    def _emit_data(self, slot: _Slot, data: bytes) -> tuple[int, bytes]:
        """The start block of an inode's own data, and what stands behind its header."""
        whole = len(data)
        if slot.layout == fmt.LAYOUT_INLINE:
            whole -= len(data) % BLOCK_BYTES
        return (self._put(data[:whole]) if whole else 0), data[whole:]

    def _directory(self, inode: Inode, parent: Inode, slot: _Slot) -> bytes:
        slots = self._slots
        entries = {b".": (slot.at, Kind.DIR), b"..": (slots[id(parent)].at, Kind.DIR)}
        for name, child in inode.children.items():
            kind = Kind.CHAR if child.kind is Kind.WHITEOUT else child.kind
            entries[name] = (slots[id(child)].at, kind)
        return directory_blocks(entries, slot.splits)

    def _chunk_table(self, inode: Inode, bits: int) -> bytes:
        chunk = BLOCK_BYTES << bits
        blocks_a_chunk = 1 << bits
        table = bytearray(fmt.CHUNK_INDEX.pack(0, 0, fmt.HOLE) * _chunk_count(inode, bits))
        for segment in inode.segments:
            if segment.inline is None:
                device, block = 1, segment.view_offset // BLOCK_BYTES
            else:
                device, block = 0, self._put(segment.inline)
            first = segment.file_offset // chunk
            for number in range(first, -(-(segment.file_offset + segment.length) // chunk)):
                fmt.CHUNK_INDEX.pack_into(table, number * fmt.CHUNK_INDEX.size, 0, device, block)
                block += blocks_a_chunk
        return bytes(table)

    def _emit_superblock(self, image: bytearray, xattr_block: int) -> None:
        seconds, nanoseconds = divmod(self._epoch_ns, _BILLION)
        uuid = sha256(b"ember erofs\0" + self._tag).digest()[:16]
        fields = [
            fmt.MAGIC, 0, fmt.COMPAT_CHECKSUM | fmt.COMPAT_MTIME, fmt.BLOCK_BITS, 0,
            self._slots[id(self._root)].at // fmt.NID_BYTES, len(self._order), seconds,
            nanoseconds, self._view_block, 0, xattr_block, uuid, b"",
            fmt.INCOMPAT_CHUNKED | fmt.INCOMPAT_DEVICES, 0, 1,
            fmt.DEVICE_AT // fmt.DEVICE_SLOT_BYTES, 0, 0, 0, 0, 0,
        ]  # fmt: skip
        fmt.SUPERBLOCK.pack_into(image, fmt.SUPERBLOCK_AT, *fields)
        fmt.DEVICE.pack_into(image, fmt.DEVICE_AT, self._tag, self._device_blocks, self._view_block)
        block = memoryview(image)[fmt.SUPERBLOCK_AT : fmt.SUPERBLOCK_AT + BLOCK_BYTES]
        crc = fmt.checksum(block)
        block[4:8] = crc.to_bytes(4, "little")


def _enclosed(root: Inode) -> Inode:
    """A root that has the layer's root as its only name.

    What is mounted is the layer only below that name, so the bare directory under a mount that is
    gone is never taken for a layer without files.
    """
    outer = Inode(Kind.DIR, 0o755, mtime_ns=root.mtime_ns)
    outer.children = {fmt.LAYER_NAME: root}
    outer.nlink = 3
    return outer


def chunk_bits(inode: Inode) -> int:
    """log2 of the chunk / 512 for a file in several pieces: each chunk is of one piece or none."""
    bits = min(fmt.CHUNK_BITS_MAX, max(0, (inode.size - 1).bit_length() - fmt.BLOCK_BITS))
    for segment in inode.segments:
        for edge in (segment.file_offset, segment.file_offset + segment.length):
            if 0 < edge < inode.size:
                block = edge // BLOCK_BYTES
                bits = min(bits, (block & -block).bit_length() - 1)
    return bits


def _chunk_count(inode: Inode, bits: int) -> int:
    return -(-inode.size // (BLOCK_BYTES << bits))


def _block_count(length_bytes: int) -> int:
    return -(-length_bytes // BLOCK_BYTES)


def _is_flat(inode: Inode) -> bool:
    """Whether the file is empty, or short and in one piece in the view."""
    if len(inode.segments) == 1 and inode.size <= fmt.FLAT_BYTES:
        segment = inode.segments[0]
        return segment.inline is None and segment.length == inode.size
    return inode.size == 0


def _inodes(root: Inode) -> Iterator[tuple[Inode, Inode]]:
    """Each inode once, with the directory that holds it; a directory's files follow it."""
    seen: set[int] = set()
    stack = [(root, root)]
    while stack:
        directory, parent = stack.pop()
        yield directory, parent
        below = []
        for _, child in sorted(directory.children.items()):
            if child.kind is Kind.DIR:
                below.append((child, directory))
            elif child.nlink == 1:
                yield child, directory
            elif id(child) not in seen:
                seen.add(id(child))
                yield child, directory
        stack.extend(reversed(below))


def _commonest_time(inodes: Iterable[Inode]) -> int:
    """The time that most inodes share, in ns: they need not store it."""
    counts = Counter(inode.mtime_ns for inode in inodes if inode.kind is not Kind.WHITEOUT)
    usable = [(count, -time) for time, count in counts.items() if 0 <= time < _BILLION << 32]
    return -max(usable)[1] if usable else 0
