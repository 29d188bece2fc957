"""Xattrs in an EROFS image: each inode's own, and those that many share, kept once.

Pure. Entries are collected first, so that one which comes again goes to the shared area and costs
each further inode four bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from snapshotter.errors import RefusedError
from snapshotter.image.erofs_format import (
    OPAQUE_VALUE,
    OPAQUE_XATTR,
    XATTR_ENTRY,
    XATTR_HEADER,
    XATTR_PREFIXES,
    padded,
)
from snapshotter.image.tree import Inode

_ICOUNT_MAX = 0xFFFF
_SHARED_MAX = 255


class XattrTable:
    """All xattr entries of an image: ``inline`` gives what stands behind an inode."""

    def __init__(self, inodes: Iterable[Inode]) -> None:
        counts: Counter[bytes] = Counter()
        for inode in inodes:
            if inode.xattrs or inode.opaque:
                counts.update(_entries(inode))
        self.shared = bytearray()
        self._ids: dict[bytes, int] = {}
        for entry, count in counts.items():
            if count > 1:
                self._ids[entry] = len(self.shared) // 4
                self.shared += entry

    def inline(self, inode: Inode) -> bytes:
        """The xattr part of an inode; empty if it has none. RefusedError if it does not fit."""
        if not inode.xattrs and not inode.opaque:
            return b""
        ids = bytearray()
        own = bytearray()
        for entry in _entries(inode):
            shared_id = self._ids.get(entry)
            if shared_id is None or len(ids) == 4 * _SHARED_MAX:
                own += entry
            else:
                ids += shared_id.to_bytes(4, "little")
        if (len(ids) + len(own)) // 4 >= _ICOUNT_MAX:
            raise RefusedError(f"an inode with {len(own)} bytes of xattrs")
        return XATTR_HEADER.pack(0, len(ids) // 4) + ids + own


def icount(inline: bytes) -> int:
    """The inode's count field for its xattr part."""
    return 1 + (len(inline) - XATTR_HEADER.size) // 4 if inline else 0


def _entries(inode: Inode) -> list[bytes]:
    named = sorted((inode.xattrs or {}).items())
    if inode.opaque:
        named.append((OPAQUE_XATTR, OPAQUE_VALUE))
    return [_entry(name, value) for name, value in named]


def _entry(name: bytes, value: bytes) -> bytes:
    for index, prefix in XATTR_PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            entry = XATTR_ENTRY.pack(len(rest), index, len(value)) + rest + value
            return entry.ljust(padded(len(entry), 4), b"\0")
    raise RefusedError(f"xattr {name!r} is of no namespace that EROFS has")
