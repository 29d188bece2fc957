"""Tar entries, one by one, put together to a tree: what an unpacker would have on disk.

Later entries replace earlier ones, directories merge, parents are resolved through the layer's own
symlinks as they are at that moment, always inside the root. Whiteouts speak of lower layers only
(image-spec, layer.md): they never hide an entry of their own layer. Pure; knows no tar bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from snapshotter.errors import RefusedError
from snapshotter.image.limits import ScanLimits
from snapshotter.image.names import (
    NAME_BYTES,
    OPAQUE_MARK,
    WHITEOUT_PREFIX,
    clean,
    hidden_name,
    shown,
)
from snapshotter.image.tree import Inode, Kind, LayerTree, finish_tree

_LINKS_FOLLOWED = 255
_DEFAULT_MODE = 0o755
_REMEMBERED = 65536
_REMEMBERED_BYTES = 16 << 20


class Place(NamedTuple):
    """Where an entry goes: a name in a directory; ``path`` is its cleaned name, for messages."""

    parent: Inode
    base: bytes
    path: bytes


class TreeAssembler:
    """Takes the entries of one layer in order; ``finish`` gives the tree.

    Life: for each entry ``locate``, then ``put`` or (if ``is_mark``) ``hide``; ``finish`` once.
    All raise RefusedError with the entry's name.
    """

    def __init__(self, limits: ScanLimits) -> None:
        self._limits = limits
        self._root = Inode(Kind.DIR, _DEFAULT_MODE)
        self._parents: dict[bytes, Inode] = {b"": self._root}
        self._parents_bytes = 0
        self._pending: dict[int, tuple[Place, Inode]] = {}
        self._inodes = 0
        self._text_bytes = 0
        self._steps = 0
        self.entries = 0

    def locate(self, name: bytes, mtime_ns: int) -> Place | None:
        """Where an entry of this name goes, its parents made; None for the root itself."""
        path = clean(name)
        if not path:
            return None
        directory, _, base = path.rpartition(b"/")
        parent = self._parents.get(directory)
        if parent is None:
            parent = self._resolve(directory, mtime_ns)
            self._remember(directory, parent)
        self.entries += 1
        self._count(len(base))
        if len(base) > NAME_BYTES:
            raise RefusedError(f"entry {shown(path)}: a name of {len(base)} bytes")
        return Place(parent, base, path)

    @staticmethod
    def is_mark(base: bytes) -> bool:
        """Whether the name is a whiteout or the opaque mark, of whatever type the entry is."""
        return base.startswith(WHITEOUT_PREFIX)

    def hide(self, place: Place) -> None:
        """Apply a whiteout or an opaque mark."""
        parent, base, _ = place
        if base == OPAQUE_MARK:
            parent.opaque = True
            return
        hidden = hidden_name(base)
        before = parent.children.get(hidden)
        if before is None:
            parent.children[hidden] = Inode(Kind.WHITEOUT)
        elif before.kind is Kind.DIR:
            before.opaque = True

    def put(self, place: Place, inode: Inode) -> None:
        """Apply an entry that is a file of any kind.

        Kind LINK is a hard link to the name in ``target``: its attributes become the target's.
        """
        extra = len(inode.target)
        if inode.xattrs:
            extra += sum(len(name) + len(value) for name, value in inode.xattrs.items())
        if extra:
            self._charge(extra)
        if inode.kind is Kind.LINK:
            self._link(place, inode)
        else:
            self._place(place.parent, place.base, inode)

    def finish(self, view_bytes: int) -> LayerTree:
        """Settle the links whose targets came later, and close the tree."""
        for place, link in list(self._pending.values()):
            chain = {id(link): (place, link)}
            while True:
                target = self._target(link, place)
                if target is None or id(target) in chain:
                    raise RefusedError(
                        f"entry {shown(place.path)}: hard link to {shown(link.target)},"
                        " which the layer does not have"
                    )
                if target.kind is not Kind.LINK:
                    break
                place, link = chain[id(target)] = self._pending[id(target)]
            for waiting, placeholder in chain.values():
                if waiting.parent.children.get(waiting.base) is placeholder:
                    waiting.parent.children[waiting.base] = target
        return finish_tree(self._root, view_bytes=view_bytes, entries=self.entries)

    def _count(self, text_bytes: int) -> None:
        self._inodes += 1
        if self._inodes > self._limits.inodes:
            raise RefusedError(f"the layer has more than {self._limits.inodes} files")
        self._charge(text_bytes)

    def _charge(self, text_bytes: int) -> None:
        self._text_bytes += text_bytes
        if self._text_bytes > self._limits.text_bytes:
            raise RefusedError(
                f"names, links and xattrs of the layer exceed {self._limits.text_bytes} bytes"
            )

    def _remember(self, directory: bytes, inode: Inode) -> None:
        self._parents_bytes += len(directory)
        if len(self._parents) > _REMEMBERED or self._parents_bytes > _REMEMBERED_BYTES:
            self._forget()
        self._parents[directory] = inode

    def _forget(self) -> None:
        self._parents = {b"": self._root}
        self._parents_bytes = 0

    def _place(self, parent: Inode, base: bytes, inode: Inode) -> None:
        before = parent.children.get(base)
        if before is not None:
            if inode.kind is Kind.DIR:
                if before.kind is Kind.DIR:
                    _merge_directory(before, inode)
                    return
                inode.opaque = before.kind is Kind.WHITEOUT
            if before.kind is Kind.DIR or before.kind is Kind.SYMLINK:
                self._forget()
        parent.children[base] = inode

    def _link(self, place: Place, link: Inode) -> None:
        target = self._target(link, place)
        if target is None or target.kind is Kind.LINK:
            self._place(place.parent, place.base, link)
            self._pending[id(link)] = (place, link)
            return
        target.uid, target.gid, target.mtime_ns = link.uid, link.gid, link.mtime_ns
        if target.kind is not Kind.SYMLINK:
            target.mode = link.mode
        if link.xattrs:
            if target.kind is not Kind.FILE:
                link.xattrs = {k: v for k, v in link.xattrs.items() if k[:5] != b"user."}
            target.xattrs = {**(target.xattrs or {}), **link.xattrs}
        self._place(place.parent, place.base, target)

    def _target(self, link: Inode, place: Place) -> Inode | None:
        """What a hard link's target name shows now; None if nothing, or a whiteout."""
        what = f"entry {shown(place.path)}: hard link to"
        directory, _, base = clean(link.target, what).rpartition(b"/")
        parent = self._parents.get(directory)
        if parent is None:
            parent, missing = self._follow(directory)
            if missing or parent.kind is not Kind.DIR:
                return None
        if parent is place.parent and base == place.base:
            raise RefusedError(f"{what} itself")
        target = parent.children.get(base) if base else parent
        if target is None or target.kind is Kind.WHITEOUT:
            return None
        if target.kind is Kind.DIR:
            raise RefusedError(f"{what} the directory {shown(link.target)}")
        return target

    def _resolve(self, directory: bytes, mtime_ns: int) -> Inode:
        """The directory that ``directory`` leads to now; what is missing of it becomes implied."""
        parent, missing = self._follow(directory)
        if parent.kind is not Kind.DIR:
            raise RefusedError(f"entry below {shown(directory)}: a parent is no directory")
        for name in missing:
            if len(name) > NAME_BYTES:
                raise RefusedError(f"entry below {shown(directory)}: a name of {len(name)} bytes")
            self._count(len(name))
            made = Inode(Kind.DIR, _DEFAULT_MODE, 0, 0, mtime_ns)
            made.implied = True
            self._place(parent, name, made)
            parent = made
        return parent

    def _follow(self, directory: bytes) -> tuple[Inode, list[bytes]]:
        """Walk from the root through symlinks: the last inode reached, and the names that lack.

        ``..`` stops at the root, as it would for a process whose root the layer is. The inode
        is not a directory if the walk ran into something else.
        """
        trail = [self._root]
        missing: list[bytes] = []
        todo = directory.split(b"/")[::-1]
        followed = 0
        while todo:
            self._steps += 1
            name = todo.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if missing:
                    missing.pop()
                elif len(trail) > 1:
                    trail.pop()
                continue
            child = None if missing else trail[-1].children.get(name)
            if child is None or child.kind is Kind.WHITEOUT:
                missing.append(name)
            elif child.kind is Kind.SYMLINK:
                followed += 1
                if followed > _LINKS_FOLLOWED or self._steps > self._limits.steps:
                    raise RefusedError(f"entry below {shown(directory)}: too many symlinks")
                if child.target[:1] == b"/":
                    trail = [self._root]
                todo.extend(child.target.split(b"/")[::-1])
            elif child.kind is not Kind.DIR:
                return child, []
            else:
                trail.append(child)
        if self._steps > self._limits.steps:
            raise RefusedError(f"entry below {shown(directory)}: names too deep, too often")
        return trail[-1], missing


def _merge_directory(before: Inode, entry: Inode) -> None:
    """A directory that comes again: the last attributes win, what is in it stays."""
    if entry.implied:
        return
    before.mode, before.uid, before.gid = entry.mode, entry.uid, entry.gid
    before.mtime_ns, before.xattrs, before.implied = entry.mtime_ns, entry.xattrs, False
