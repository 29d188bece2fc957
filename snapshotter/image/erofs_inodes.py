"""Inodes of an EROFS image, parsed with every bound checked.

Pure. Knows single inodes only: names and the shape of the tree are the reader's.
"""

from __future__ import annotations

import math
from typing import NamedTuple, NoReturn

from snapshotter.errors import RefusedError
from snapshotter.image import erofs_format as fmt
from snapshotter.image.entries import LINK_BYTES
from snapshotter.image.tree import BLOCK_BYTES, Inode, Kind, Segment, Xattrs
from snapshotter.image.xattrs import passes

_BILLION = 1_000_000_000
_FILE = fmt.TYPE_BITS[Kind.FILE]
_KINDS = {bits: Kind(file_type) for file_type, bits in fmt.TYPE_BITS.items()}
_PREFIXES = dict(fmt.XATTR_PREFIXES)


class RawInode(NamedTuple):
    """An inode's header as stored; ``kind`` is its on-disk type (a whiteout is a CHAR here)."""

    nid: int
    kind: Kind
    layout: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    union: int
    xattr_at: int
    xattr_bytes: int
    implied: bool

    @property
    def behind(self) -> int:
        """Where the image goes on behind the header and the xattrs."""
        return self.xattr_at + self.xattr_bytes


class InodeParser:
    """Reads single inodes of one image; RefusedError names the inode and its fault.

    ``room_bytes`` is how much of the image may still be used up: where no two parts of an image
    may share bytes, nobody reads more of it than there is.
    """

    def __init__(
        self,
        image: memoryview,
        *,
        epoch_ns: int,
        view_block: int,
        device_blocks: int,
        xattr_at: int,
    ) -> None:
        self._image = image
        self._epoch_ns = epoch_ns
        self._view_block = view_block
        self._device_blocks = device_blocks
        self._xattr_at = xattr_at
        self._shared: dict[int, tuple[bytes, bytes]] = {}
        self._allowed: set[tuple[int, Kind]] = set()
        self.room_bytes: float = math.inf

    def whole_file(self, nid: int) -> Inode | None:
        """Inode ``nid`` if it is what most are, a file in one piece without xattrs; else None.

        As inode(raw(nid)), in half the time; what is wrong with an inode is for those to say.
        """
        at, image = nid * fmt.NID_BYTES, self._image
        if not fmt.FIRST_INODE_AT <= at <= len(image) - fmt.EXTENDED.size:
            return None
        if image[at] & 1:
            form, count, mode, zero, size, union, _, uid, gid, seconds, nsec, nlink, flags = (
                fmt.EXTENDED.unpack_from(image, at)
            )
            if nsec >= _BILLION or flags:
                return None
            mtime_ns = (seconds - ((seconds >> 63) << 64)) * _BILLION + nsec
            header = fmt.EXTENDED.size
        else:
            form, count, mode, nlink, size, zero, union, _, uid, gid, reserved = (
                fmt.COMPACT.unpack_from(image, at)
            )
            if reserved:
                return None
            mtime_ns = self._epoch_ns
            header = fmt.COMPACT.size
        if count or zero or mode & 0o170000 != _FILE or not size:
            return None
        layout = form >> 1
        if layout == fmt.LAYOUT_PLAIN:
            first = union - self._view_block
        elif layout == fmt.LAYOUT_CHUNKED:
            first = self._only_chunk(at + header, union, size)
            header += fmt.CHUNK_INDEX.size
        else:
            return None
        inside = first >= 0 and first + -(-size // BLOCK_BYTES) <= self._device_blocks
        if not inside or header > self.room_bytes:
            return None
        self.room_bytes -= header
        inode = Inode(Kind.FILE, mode & 0o7777, uid, gid, mtime_ns)
        inode.nlink, inode.size = nlink, size
        inode.segments = (Segment(0, size, first * BLOCK_BYTES),)
        return inode

    def _only_chunk(self, at: int, union: int, size: int) -> int:
        """The view's block that the one entry of a chunk table names; -1 if that is not so."""
        if union >> 5 != 1 or size > BLOCK_BYTES << (union & 31):
            return -1
        if at + fmt.CHUNK_INDEX.size > len(self._image):
            return -1
        high, device, block = fmt.CHUNK_INDEX.unpack_from(self._image, at)
        return block if device == 1 and not high and block != fmt.HOLE else -1

    def raw(self, nid: int) -> RawInode:
        """The header of inode ``nid``."""
        at = nid * fmt.NID_BYTES
        if not fmt.FIRST_INODE_AT <= at <= len(self._image) - fmt.EXTENDED.size // 2:
            _refuse(nid, "lies outside of the image")
        form = self._image[at] | self._image[at + 1] << 8
        if form & 1:
            if at + fmt.EXTENDED.size > len(self._image):
                _refuse(nid, "lies outside of the image")
            (
                _, count, mode, zero, size, union, _ino, uid, gid, seconds, nsec, nlink, flags,
            ) = fmt.EXTENDED.unpack_from(self._image, at)  # fmt: skip
            seconds -= (seconds >> 63) << 64
            mtime_ns = seconds * _BILLION + nsec
            header = fmt.EXTENDED.size
        else:
            (
                _, count, mode, nlink, size, zero, union, _ino, uid, gid, reserved,
            ) = fmt.COMPACT.unpack_from(self._image, at)  # fmt: skip
            nsec, mtime_ns, flags, zero = 0, self._epoch_ns, 0, zero | reserved
            header = fmt.COMPACT.size
        kind = _KINDS.get(mode & 0o170000)
        layout = form >> 1
        implied = flags == fmt.FLAG_IMPLIED and kind is Kind.DIR
        if kind is None or zero or nsec >= _BILLION or (flags and not implied):
            _refuse(nid, f"has the mode {mode:o} or a field that must be zero")
        xattr_bytes = fmt.XATTR_HEADER.size + (count - 1) * 4 if count else 0
        raw = RawInode(
            nid, kind, layout, mode & 0o7777, uid, gid, size, mtime_ns, nlink, union, at + header,
            xattr_bytes, implied,
        )  # fmt: skip
        self._check_layout(raw)
        return raw

    def _check_layout(self, raw: RawInode) -> None:
        if raw.behind > len(self._image):
            _refuse(raw.nid, "has xattrs outside of the image")
        if raw.kind is Kind.FILE:
            fits = raw.layout in (fmt.LAYOUT_PLAIN, fmt.LAYOUT_CHUNKED)
        elif raw.kind is Kind.DIR:
            fits = raw.layout in (fmt.LAYOUT_PLAIN, fmt.LAYOUT_INLINE) and raw.size > 0
        elif raw.kind is Kind.SYMLINK:
            fits = raw.layout in (fmt.LAYOUT_PLAIN, fmt.LAYOUT_INLINE)
            fits = fits and 0 < raw.size <= LINK_BYTES
        else:
            fits = raw.layout == fmt.LAYOUT_PLAIN and raw.size == 0
        if not fits:
            _refuse(raw.nid, f"a {raw.kind.name} of {raw.size} bytes in layout {raw.layout}")

    def data(self, raw: RawInode) -> memoryview | bytes:
        """A directory's or symlink's own data."""
        whole = raw.size
        self._use_up(raw.nid, whole)
        tail: memoryview | bytes = b""
        if raw.layout == fmt.LAYOUT_INLINE:
            tail_bytes = raw.size % BLOCK_BYTES
            whole -= tail_bytes
            room = BLOCK_BYTES - raw.behind % BLOCK_BYTES
            if not tail_bytes or tail_bytes > min(room, len(self._image) - raw.behind):
                _refuse(raw.nid, "its inline data cross a block or leave the image")
            tail = self._image[raw.behind : raw.behind + tail_bytes]
            if not whole:
                return tail
        start = raw.union * BLOCK_BYTES
        if start + whole > len(self._image):
            _refuse(raw.nid, "its data lie outside of the image")
        head = self._image[start : start + whole]
        return b"".join((head, tail)) if len(tail) else head

    def inode(self, raw: RawInode) -> Inode:
        """The inode with everything but children and a final link count."""
        self._use_up(raw.nid, raw.behind - raw.nid * fmt.NID_BYTES)
        inode = Inode(raw.kind, raw.mode, raw.uid, raw.gid, raw.mtime_ns)
        inode.nlink, inode.implied = raw.nlink, raw.implied
        if raw.kind is Kind.FILE:
            inode.size = raw.size
            inode.segments = self._segments(raw)
        elif raw.kind is Kind.SYMLINK:
            inode.size = raw.size
            inode.target = bytes(self.data(raw))
            if 0 in inode.target:
                _refuse(raw.nid, "a symlink with a NUL")
        elif raw.kind in (Kind.CHAR, Kind.BLOCK):
            inode.rdev = fmt.decode_device(raw.union)
            if raw.kind is Kind.CHAR and raw.union == 0:
                inode = Inode(Kind.WHITEOUT)
                inode.nlink = raw.nlink
        if raw.xattr_bytes:
            inode.xattrs, inode.opaque = self._xattrs(raw)
        return inode

    def _use_up(self, nid: int, length_bytes: int) -> None:
        self.room_bytes -= length_bytes
        if self.room_bytes < 0:
            _refuse(nid, "parts of the image lie over each other")

    def _segments(self, raw: RawInode) -> tuple[Segment, ...]:
        if raw.layout == fmt.LAYOUT_CHUNKED:
            return self._chunked_segments(raw)
        if raw.size == 0:
            return ()
        first = raw.union - self._view_block
        if first < 0 or first + -(-raw.size // BLOCK_BYTES) > self._device_blocks:
            _refuse(raw.nid, "its data lie outside of the view")
        return (Segment(0, raw.size, first * BLOCK_BYTES),)

    def _chunked_segments(self, raw: RawInode) -> tuple[Segment, ...]:
        if raw.union >> 5 != 1 or not raw.size:
            _refuse(raw.nid, f"has the chunk format {raw.union:#x}")
        blocks_a_chunk = 1 << (raw.union & 31)
        chunk = BLOCK_BYTES * blocks_a_chunk
        count = -(-raw.size // chunk)
        start = fmt.padded(raw.behind, fmt.CHUNK_INDEX.size)
        end = start + count * fmt.CHUNK_INDEX.size
        if end > len(self._image):
            _refuse(raw.nid, "has a chunk table outside of the image")
        self._use_up(raw.nid, end - start)
        runs: list[tuple[int, int, int, int]] = []  # device, first block, file offset, length
        table = fmt.CHUNK_INDEX.iter_unpack(self._image[start:end])
        for number, (high, device, block) in enumerate(table):
            if high or device > 1 or (block == fmt.HOLE and device):
                _refuse(raw.nid, f"chunk {number} is on the device {device}")
            if block == fmt.HOLE:
                continue
            offset = number * chunk
            length = min(chunk, raw.size - offset)
            limit = self._device_blocks if device else self._view_block
            if block + -(-length // BLOCK_BYTES) > limit:
                _refuse(raw.nid, f"chunk {number} lies outside of its device")
            if runs:
                last_device, last_block, last_offset, last_length = runs[-1]
                expected = last_block + last_length // BLOCK_BYTES
                if (device, block, offset) == (last_device, expected, last_offset + last_length):
                    runs[-1] = (device, last_block, last_offset, last_length + length)
                    continue
            runs.append((device, block, offset, length))
        return tuple(self._segment(raw.nid, *run) for run in runs)

    def _segment(self, nid: int, device: int, block: int, offset: int, length: int) -> Segment:
        at = block * BLOCK_BYTES
        if device:
            return Segment(offset, length, at)
        self._use_up(nid, length)
        return Segment(offset, length, -1, bytes(self._image[at : at + length]))

    def _xattrs(self, raw: RawInode) -> tuple[Xattrs | None, bool]:
        found: Xattrs = {}
        for name, value in self._xattr_entries(raw):
            if name in found:
                _refuse(raw.nid, f"has the xattr {name!r} twice")
            found[name] = value
        opaque = found.pop(fmt.OPAQUE_XATTR, None) is not None
        return found or None, opaque

    def _xattr_entries(self, raw: RawInode) -> list[tuple[bytes, bytes]]:
        _, shared = fmt.XATTR_HEADER.unpack_from(self._image, raw.xattr_at)
        at, end = raw.xattr_at + fmt.XATTR_HEADER.size, raw.behind
        if at + 4 * shared > end or (shared and not self._xattr_at):
            _refuse(raw.nid, "has more shared xattrs than room for them")
        entries = []
        for _ in range(shared):
            shared_id = int.from_bytes(self._image[at : at + 4], "little")
            entries.append(self._shared_entry(raw, shared_id))
            at += 4
        while at < end:
            name, value, at = self._xattr_entry(raw, at)
            _check_xattr(raw, name, value)
            entries.append((name, value))
        if at != end:
            _refuse(raw.nid, "has an xattr that leaves its room")
        return entries

    def _shared_entry(self, raw: RawInode, shared_id: int) -> tuple[bytes, bytes]:
        """One object for all inodes that share it, and looked at once for each kind of them."""
        entry = self._shared.get(shared_id)
        if entry is None:
            at = self._xattr_at + 4 * shared_id
            name, value, end = self._xattr_entry(raw, at)
            self._use_up(raw.nid, end - at)
            entry = self._shared[shared_id] = name, value
        if (shared_id, raw.kind) not in self._allowed:
            _check_xattr(raw, *entry)
            self._allowed.add((shared_id, raw.kind))
        return entry

    def _xattr_entry(self, raw: RawInode, at: int) -> tuple[bytes, bytes, int]:
        name_at = at + fmt.XATTR_ENTRY.size
        if name_at > len(self._image):
            _refuse(raw.nid, "has an xattr outside of the image")
        name_bytes, index, value_bytes = fmt.XATTR_ENTRY.unpack_from(self._image, at)
        value_at = name_at + name_bytes
        end = value_at + value_bytes
        prefix = _PREFIXES.get(index)
        if end > len(self._image) or prefix is None:
            _refuse(raw.nid, f"has an xattr outside of the image or of the namespace {index}")
        name = prefix + bytes(self._image[name_at:value_at])
        return name, bytes(self._image[value_at:end]), fmt.padded(end, 4)


def _check_xattr(raw: RawInode, name: bytes, value: bytes) -> None:
    mark = (raw.kind, name, value) == (Kind.DIR, fmt.OPAQUE_XATTR, fmt.OPAQUE_VALUE)
    if not mark and not passes(name, value, raw.kind):
        _refuse(raw.nid, f"has the xattr {name!r}")


def _refuse(nid: int, fault: str) -> NoReturn:
    raise RefusedError(f"EROFS image: inode {nid}: {fault}")
