"""One tar entry as an inode: types, owners, devices, links.

Pure. Places nothing in a tree, and does not know the entry's cleaned name.
"""

from __future__ import annotations

from snapshotter.errors import RefusedError
from snapshotter.image.names import shown
from snapshotter.image.tar_header import Header
from snapshotter.image.tree import Inode, Kind
from snapshotter.image.xattrs import entry_xattrs, fit_acl

LINK_BYTES = 4095

_KINDS = {
    ord("\0"): Kind.FILE,
    ord("0"): Kind.FILE,
    ord("1"): Kind.LINK,
    ord("2"): Kind.SYMLINK,
    ord("3"): Kind.CHAR,
    ord("4"): Kind.BLOCK,
    ord("5"): Kind.DIR,
    ord("6"): Kind.FIFO,
    ord("7"): Kind.FILE,  # contiguous: a file, says POSIX
    ord("S"): Kind.FILE,  # old GNU sparse
}
_ID_END = 1 << 32
_MAJOR_END = 1 << 12
_MINOR_END = 1 << 20


def entry_inode(header: Header, records: dict[bytes, bytes]) -> Inode:
    """The inode that an entry describes; a file's size and segments are left to the caller.

    RefusedError without the entry's name: the caller knows it.
    """
    kind = _KINDS.get(header.type)
    if kind is None:
        raise RefusedError(f"an entry of the unknown type {chr(header.type)!r}")
    if kind is Kind.FILE and header.type == 0 and header.name[-1:] == b"/":
        kind = Kind.DIR  # V7 had no type for directories
    inode = Inode(
        kind,
        header.mode & 0o7777,
        owner(header.uid, "uid"),
        owner(header.gid, "gid"),
        header.mtime_ns,
    )
    if kind is Kind.SYMLINK or kind is Kind.LINK:
        inode.target = _checked_target(header.link, kind)
        if kind is Kind.SYMLINK:
            inode.mode = 0o777
            inode.size = len(inode.target)
    elif kind is Kind.CHAR or kind is Kind.BLOCK:
        inode.rdev = _device(header)
        if kind is Kind.CHAR and inode.rdev == (0, 0):
            return Inode(Kind.WHITEOUT)  # on disk it is one, and overlayfs would take it for one
    if records:
        inode.xattrs = entry_xattrs(records, Kind.FILE if kind is Kind.LINK else kind)
        if inode.xattrs and kind is not Kind.LINK:
            fit_acl(inode.xattrs, inode.mode)
    return inode


def owner(value: int, what: str) -> int:
    """A uid or gid as lchown(2) takes it: negative ones wrap, and -1 leaves root."""
    if not -(1 << 31) <= value < _ID_END:
        raise RefusedError(f"{what} {value} does not fit 32 bits")
    wrapped = value % _ID_END
    return 0 if wrapped == _ID_END - 1 else wrapped


def _checked_target(target: bytes, kind: Kind) -> bytes:
    what = "symlink" if kind is Kind.SYMLINK else "hard link"
    if not target:
        raise RefusedError(f"a {what} to nothing")
    if len(target) > LINK_BYTES or b"\0" in target:
        raise RefusedError(f"a {what} to {shown(target)}: {len(target)} bytes, or a NUL in it")
    return target


def _device(header: Header) -> tuple[int, int]:
    if not (0 <= header.devmajor < _MAJOR_END and 0 <= header.devminor < _MINOR_END):
        raise RefusedError(f"device number {header.devmajor}:{header.devminor} is out of range")
    return header.devmajor, header.devminor
