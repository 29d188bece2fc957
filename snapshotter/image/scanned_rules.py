"""What a tree must be for a scan to have made it, whoever says so. Pure.

An image of other origin may be well formed and still hold what no tar of a layer leads to. The
rules here are those of entries.py, assembly.py and limits.py, asked the other way round.
"""

from __future__ import annotations

from snapshotter.errors import RefusedError
from snapshotter.image.limits import ScanLimits
from snapshotter.image.names import WHITEOUT_PREFIX, shown
from snapshotter.image.tree import Inode, Kind, LayerTree

_NO_OWNER = 0xFFFFFFFF
_LINK_MODE = 0o777


def check_scanned(tree: LayerTree, limits: ScanLimits) -> None:
    """RefusedError names the first thing in ``tree`` that no scan would have let pass."""
    if tree.view_bytes > limits.view_bytes:
        raise RefusedError(f"a view of {tree.view_bytes} bytes, at most {limits.view_bytes}")
    text_bytes = inline_bytes = count = 0
    seen: set[int] = set()
    stack = [tree.root]
    fault = _fault(tree.root)
    if fault:
        raise RefusedError(f"the root {fault}")
    while stack:
        for name, inode in stack.pop().children.items():
            text_bytes += len(name)
            if inode.nlink != 1:
                if id(inode) in seen:
                    continue
                seen.add(id(inode))
            count += 1
            may = inode.implied or inode.kind is Kind.WHITEOUT
            if name.startswith(WHITEOUT_PREFIX) and not may:
                raise RefusedError(f"the name {shown(name)}, which hides another and is no file")
            fault = _fault(inode)
            if fault:
                raise RefusedError(f"the entry {shown(name)} {fault}")
            text_bytes += len(inode.target)
            if inode.xattrs:
                text_bytes += sum(len(key) + len(value) for key, value in inode.xattrs.items())
            if inode.kind is Kind.DIR:
                stack.append(inode)
            elif len(inode.segments) > 1 or (inode.segments and inode.segments[0].inline):
                inline_bytes += sum(len(segment.inline or b"") for segment in inode.segments)
        if count > limits.inodes:
            raise RefusedError(f"more than {limits.inodes} files")
        if text_bytes > limits.text_bytes or inline_bytes > limits.inline_bytes:
            raise RefusedError(
                f"more than {limits.text_bytes} bytes of names, links and xattrs, or than "
                f"{limits.inline_bytes} of content"
            )


def _fault(inode: Inode) -> str:
    kind = inode.kind
    if kind is Kind.SOCKET:
        return "is a socket, which no tar has"
    if kind is Kind.WHITEOUT and (inode.xattrs or inode.nlink != 1):
        return "is a whiteout with xattrs or of several names"
    if kind is Kind.SYMLINK and inode.mode != _LINK_MODE:
        return f"is a symlink of mode {inode.mode:o}"
    if inode.uid == _NO_OWNER or inode.gid == _NO_OWNER:
        return "belongs to nobody"
    return ""
