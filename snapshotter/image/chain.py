"""Fits a layer to the layers below it, so that overlayfs shows what the image means.

Directories that a layer only implies take mode, owner and xattrs from the topmost layer below that
has them, as containerd's unpacker does, or the stack would show defaults; whiteouts and opaque
marks that hide nothing go away, or they would be listed as ghosts; an opaque root, which overlayfs
ignores, becomes whiteouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from snapshotter.image.lower import LowerLayer
from snapshotter.image.tree import Inode, Kind, LayerTree, finish_tree

_LINKS_FOLLOWED = 40
_NAMES_WALKED = 4096


def adapt(tree: LayerTree, below: Sequence[LowerLayer]) -> LayerTree | None:
    """The tree as it must be mounted on top of ``below`` (lowest layer first).

    None if nothing has to change. The layers below are given as they are mounted themselves.
    """
    if not tree.needs_chain:
        return None
    return _Adapter(tree, Merged.of(below)).adapted()


class Merged:
    """What a stack of layers shows at one place, merged as overlayfs does.

    ``layers`` are those whose directories are merged here (top first); empty if it is no directory.
    """

    __slots__ = ("_children", "inode", "layers")

    def __init__(self, inode: Inode, layers: tuple[LowerLayer, ...]) -> None:
        self.inode = inode
        self.layers = layers
        self._children: dict[bytes, Merged | None] = {}

    @classmethod
    def of(cls, stack: Sequence[LowerLayer]) -> Merged:
        """The root of a stack, lowest layer first; of none, an empty directory."""
        inode = stack[-1].inode if stack else Inode(Kind.DIR, 0o755)
        return cls(inode, tuple(reversed(stack)))

    def child(self, name: bytes) -> Merged | None:
        """What is shown under ``name``; None if nothing. No symlink is followed."""
        if name not in self._children:
            self._children[name] = self._merge(name)
        return self._children[name]

    def _merge(self, name: bytes) -> Merged | None:
        top: Inode | None = None
        layers: list[LowerLayer] = []
        for layer in self.layers:
            found = layer.child(name)
            if found is None:
                continue
            inode = found.inode
            if inode.kind is not Kind.DIR:
                if top is None and inode.kind is not Kind.WHITEOUT:
                    top = inode
                break
            top = top or inode
            layers.append(found)
            if inode.opaque:
                break
        return None if top is None else Merged(top, tuple(layers))

    def names(self) -> set[bytes]:
        """All names that are shown in this directory."""
        candidates = {name for layer in self.layers for name in layer.names()}
        return {name for name in candidates if self.child(name) is not None}


_NOTHING = Merged(Inode(Kind.WHITEOUT), ())
"""Stands for a place where the chain shows nothing."""


class Spot:
    """A place in one single layer, reached through that layer's own symlinks, inside its root."""

    __slots__ = ("_layer", "_parent", "inode")

    def __init__(self, layer: LowerLayer, parent: Spot | None) -> None:
        self._layer = layer
        self.inode = layer.inode
        self._parent = parent
        """None of the root: one that knew itself would keep its layer's file open."""

    @property
    def parent(self) -> Spot:
        return self._parent or self

    @property
    def root(self) -> Spot:
        here = self
        while here._parent is not None:
            here = here._parent
        return here

    def follow(self, name: bytes) -> Spot | None:
        """Where ``name`` leads to from here; None if nowhere.

        What is not a directory (a whiteout, too) blocks the way: the spot is that of the block.
        """
        here = self
        todo = [name]
        followed = walked = 0
        while todo and here.inode.kind is Kind.DIR:
            part = todo.pop()
            walked += 1
            if part in (b"", b"."):
                continue
            if part == b"..":
                here = here.parent
                continue
            layer = here._layer.child(part)
            if layer is None or walked > _NAMES_WALKED:
                return None
            found = Spot(layer, here)
            if found.inode.kind is not Kind.SYMLINK:
                here = found
                continue
            followed += 1
            if followed > _LINKS_FOLLOWED:
                return None
            if found.inode.target[:1] == b"/":
                here = here.root
            todo.extend(reversed(found.inode.target.split(b"/")))
        return here


class _Place:
    """A directory of the layer, and what the chain below has there; looked up only when asked.

    ``covered``: an opaque mark of the layer itself, here or above, hides whatever is below.
    """

    __slots__ = ("_below", "_parent", "_spots", "covered", "directory", "name")

    def __init__(
        self, directory: Inode, parent: _Place | None, name: bytes, *, covered: bool
    ) -> None:
        self.directory = directory
        self._parent = parent
        self.name = name
        self.covered = covered
        self._below: Merged | None = None
        self._spots: Sequence[Spot | None] | None = None

    @property
    def parent(self) -> _Place:
        return self._parent or self

    @classmethod
    def at_root(cls, directory: Inode, below: Merged) -> _Place:
        """The layer's root on top of the chain's."""
        place = cls(directory, None, b"", covered=False)
        place._below = below
        place._spots = [Spot(layer, None) for layer in below.layers]
        return place

    def below(self) -> Merged:
        """What the chain shows at the very same path."""
        unknown: list[_Place] = []
        place = self
        while place._below is None:
            unknown.append(place)
            place = place.parent
        found = place._below
        for place in reversed(unknown):
            found = place._below = found.child(place.name) or _NOTHING
        return found

    def spots(self) -> Sequence[Spot | None]:
        """Where the path leads in each single layer below, top first; None: it has no such."""
        unknown: list[_Place] = []
        place = self
        while place._spots is None:
            unknown.append(place)
            place = place.parent
        found = place._spots
        for place in reversed(unknown):
            found = [spot and spot.follow(place.name) for spot in found]
            place._spots = found
        return found


class _Adapter:
    def __init__(self, tree: LayerTree, below: Merged) -> None:
        self._tree = tree
        self._below = below
        self._changed = False

    def adapted(self) -> LayerTree | None:
        root = self._tree.root.copy()
        if root.opaque:
            self._spell_out_opaque_root(root)
        stack = [_Place.at_root(root, self._below)]
        while stack:
            place = stack.pop()
            for name, child in list(place.directory.children.items()):
                if child.kind is Kind.WHITEOUT:
                    if place.covered or place.below().child(name) is None:
                        del place.directory.children[name]
                        self._changed = True
                elif child.kind is Kind.DIR:
                    twin = place.directory.children[name] = child.copy()
                    stack.append(self._adapt_directory(twin, name, place))
        if not self._changed:
            return None
        return finish_tree(root, view_bytes=self._tree.view_bytes, entries=self._tree.entries)

    def _adapt_directory(self, directory: Inode, name: bytes, above: _Place) -> _Place:
        place = _Place(directory, above, name, covered=above.covered or directory.opaque)
        if directory.implied:
            self._inherit(directory, place)
        if directory.opaque and (above.covered or not place.below().layers):
            directory.opaque = False
            self._changed = True
        return place

    def _inherit(self, directory: Inode, place: _Place) -> None:
        lower = next((spot.inode for spot in place.spots() if spot), None)
        if lower is None or lower.kind is not Kind.DIR:
            return
        mine = (directory.mode, directory.uid, directory.gid, directory.xattrs or {})
        theirs = (lower.mode, lower.uid, lower.gid, lower.xattrs or {})
        if mine != theirs:  # a time alone is anybody's, and no reason for another image
            self._changed = True
        directory.mode, directory.uid, directory.gid = lower.mode, lower.uid, lower.gid
        directory.mtime_ns, directory.xattrs = lower.mtime_ns, dict(lower.xattrs or {}) or None

    def _spell_out_opaque_root(self, root: Inode) -> None:
        """overlayfs has no opaque root: hide each name of the layers below by itself."""
        root.opaque = False
        self._changed = True
        for name in self._below.names():
            child = root.children.get(name)
            if child is None:
                root.children[name] = Inode(Kind.WHITEOUT)
            elif child.kind is Kind.DIR and not child.opaque:
                twin = root.children[name] = child.copy()
                twin.opaque = True
