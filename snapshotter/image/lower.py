"""What lies below a layer: one protocol over EROFS images, plain overlay directories and trees.

A layer is given as its root, and walked name by name; nothing here follows a symlink. Only single
layers are looked at, as they are on disk; chain.py merges them.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

from snapshotter.image.erofs_format import OPAQUE_VALUE, OPAQUE_XATTR
from snapshotter.image.erofs_inodes import RawInode
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.tree import Inode, Kind, LayerTree

_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIR,
    stat.S_IFCHR: Kind.CHAR,
    stat.S_IFBLK: Kind.BLOCK,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
    stat.S_IFLNK: Kind.SYMLINK,
}


class LowerLayer(Protocol):
    """One layer of a chain, or a file in it, as overlayfs would see it there."""

    @property
    def inode(self) -> Inode:
        """What it is, whiteouts and opaque directories told as such; without children.

        Xattrs are filled in for directories; ``trusted.*`` ones never.
        """
        ...

    def child(self, name: bytes) -> LowerLayer | None:
        """What the layer itself has under ``name``; None if nothing, or if this is no directory."""
        ...

    def names(self) -> list[bytes]:
        """The names in the layer's own directory; empty if this is none."""
        ...


class ErofsLayer:
    """A layer whose metadata image is at hand. RefusedError if that is malformed."""

    def __init__(self, reader: ErofsReader, raw: RawInode | None = None) -> None:
        self._reader = reader
        self._raw = raw or reader.root()

    @property
    def inode(self) -> Inode:
        return self._reader.inode(self._raw)

    def child(self, name: bytes) -> ErofsLayer | None:
        found = self._reader.find(self._raw, name)
        return ErofsLayer(self._reader, found) if found else None

    def names(self) -> list[bytes]:
        return self._reader.names(self._raw)


class TreeLayer:
    """A layer that is a tree in memory."""

    def __init__(self, layer: LayerTree | Inode) -> None:
        self._inode = layer.root if isinstance(layer, LayerTree) else layer

    @property
    def inode(self) -> Inode:
        return self._inode

    def child(self, name: bytes) -> TreeLayer | None:
        found = self._inode.children.get(name)
        return TreeLayer(found) if found else None

    def names(self) -> list[bytes]:
        return list(self._inode.children)


class DirectoryLayer:
    """A layer unpacked into a directory, whiteouts and opaque marks in overlayfs's form.

    OSError passes through, but for what simply is not there.
    """

    def __init__(self, directory: str | bytes | os.PathLike[str]) -> None:
        self._path = os.fsencode(directory)
        self._inode = _inode_at(self._path)

    @property
    def inode(self) -> Inode:
        return self._inode

    def child(self, name: bytes) -> DirectoryLayer | None:
        if self._inode.kind is not Kind.DIR:
            return None
        try:
            return DirectoryLayer(self._path + b"/" + name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self) -> list[bytes]:
        if self._inode.kind is not Kind.DIR:
            return []
        return os.listdir(self._path)  # noqa: PTH208 (bytes)


def _inode_at(path: bytes) -> Inode:
    status = os.lstat(path)
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    if kind is Kind.CHAR and status.st_rdev == 0:
        return Inode(Kind.WHITEOUT)
    inode = Inode(
        kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns
    )
    inode.size = status.st_size
    if kind is Kind.SYMLINK:
        inode.target = os.readlink(path)  # noqa: PTH115 (bytes, and exactly as it is)
    elif kind is Kind.DIR:
        found = {
            os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        }
        inode.opaque = found.get(OPAQUE_XATTR) == OPAQUE_VALUE
        inode.xattrs = {k: v for k, v in found.items() if not k.startswith(b"trusted.")} or None
    return inode
