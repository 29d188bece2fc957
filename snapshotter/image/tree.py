"""A layer's files as values: what a tar says, before it becomes an EROFS image.

Names, link targets and xattrs are bytes as the tar has them (no encoding is assumed). Hard links
are one Inode under several names. Knows neither tar nor EROFS, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

BLOCK_BYTES = 512
"""Unit of a tar and of the EROFS images that point into it."""

Xattrs = dict[bytes, bytes]


class Kind(IntEnum):
    """What an inode is. 1 to 7 are the file types of EROFS directory entries."""

    FILE = 1
    DIR = 2
    CHAR = 3
    BLOCK = 4
    FIFO = 5
    SOCKET = 6
    SYMLINK = 7
    WHITEOUT = 8
    """Hides a name of the layers below (on disk a character device 0:0, as overlayfs wants)."""
    LINK = 9
    """A hard link whose target has not come yet; none is left in a finished tree."""


class Segment(NamedTuple):
    """Bytes [file_offset, file_offset + length) of a file; between segments are holes.

    Starts at a multiple of 512 and ends at one or at the file's end. ``view_offset`` (a multiple
    of 512) says where they lie in the view; it is -1 if they are carried here, in ``inline``.
    """

    file_offset: int
    length: int
    view_offset: int
    inline: bytes | None = None


class Inode:
    """A file, directory, device, link or whiteout with all its metadata.

    ``mode`` holds the twelve permission bits; ``rdev`` is (major, minor). A directory is
    ``implied`` if only its children's names speak of it (its attributes then come from the layers
    below), and ``opaque`` if it hides what lower layers have in it.
    """

    __slots__ = (
        "children",
        "gid",
        "implied",
        "kind",
        "mode",
        "mtime_ns",
        "nlink",
        "opaque",
        "rdev",
        "segments",
        "size",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(
        self, kind: Kind, mode: int = 0, uid: int = 0, gid: int = 0, mtime_ns: int = 0
    ) -> None:
        self.kind = kind
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.size = 0
        self.nlink = 1
        self.rdev: tuple[int, int] = (0, 0)
        self.target = b""
        self.xattrs: Xattrs | None = None
        self.segments: tuple[Segment, ...] = ()
        self.children = {} if kind is Kind.DIR else _NO_CHILDREN
        self.implied = False
        self.opaque = False

    def copy(self) -> Inode:
        """A twin of its own; children and xattrs are copied one level deep."""
        twin = Inode(self.kind, self.mode, self.uid, self.gid, self.mtime_ns)
        twin.size, twin.nlink, twin.rdev, twin.target = (
            self.size,
            self.nlink,
            self.rdev,
            self.target,
        )
        twin.xattrs = None if self.xattrs is None else dict(self.xattrs)
        twin.segments, twin.children = self.segments, dict(self.children)
        twin.implied, twin.opaque = self.implied, self.opaque
        return twin

    def __repr__(self) -> str:
        return f"<Inode {self.kind.name} {self.mode:o} {self.uid}:{self.gid} size {self.size}>"


_NO_CHILDREN: dict[bytes, Inode] = {}
"""Of all that is no directory; nothing is ever put into it."""


@dataclass(frozen=True, slots=True)
class LayerTree:
    """All that one layer says.

    ``view_bytes`` is the length of the plain tar, ``entries`` the number of its entries that were
    applied. ``needs_chain``: the tree has implied directories, whiteouts or opaque marks, so what
    is mounted depends on the layers below (chain.py).
    """

    root: Inode
    view_bytes: int
    entries: int
    needs_chain: bool

    def walk(self) -> Iterator[tuple[tuple[bytes, ...], Inode]]:
        """Every path with its inode, parents before children, children by name."""
        stack: list[tuple[tuple[bytes, ...], Inode]] = [((), self.root)]
        while stack:
            path, inode = stack.pop()
            yield path, inode
            if inode.kind is Kind.DIR:
                names = sorted(inode.children, reverse=True)
                stack.extend(((*path, name), inode.children[name]) for name in names)


def finish_tree(root: Inode, *, view_bytes: int, entries: int) -> LayerTree:
    """Count links, see whether the chain matters, and close the tree."""
    needs_chain = False
    stack = [root]
    shared: dict[int, Inode] = {}
    while stack:
        directory = stack.pop()
        needs_chain = needs_chain or (directory.implied or directory.opaque)
        directory.nlink = 2
        for child in directory.children.values():
            if child.kind is Kind.DIR:
                directory.nlink += 1
                stack.append(child)
            elif id(child) in shared:
                child.nlink += 1
            else:
                shared[id(child)] = child
                child.nlink = 1
                needs_chain = needs_chain or child.kind is Kind.WHITEOUT
    return LayerTree(root, view_bytes, entries, needs_chain)
