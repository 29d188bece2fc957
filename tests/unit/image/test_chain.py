"""Fitting a layer to what lies below it: what changes, what stays, and what it costs."""

from __future__ import annotations

import time

from snapshotter.image.chain import adapt
from snapshotter.image.lower import LowerLayer, TreeLayer
from snapshotter.image.tree import Kind
from tests.cases.tars import directory, file, layer, pax, symlink
from tests.layerstack import scan


def below(*plains: bytes) -> list[LowerLayer]:
    return [TreeLayer(scan(plain)) for plain in plains]


BASE = layer(directory(b"d", 0o711, uid=5), file(b"d/f", b"x"), directory(b"plain"))


def test_a_layer_that_implies_and_hides_nothing_stays_as_it_is() -> None:
    tree = scan(layer(directory(b"d", 0o700), file(b"d/g")))
    assert not tree.needs_chain
    assert adapt(tree, below(BASE)) is None


def test_marks_that_hide_something_and_parents_that_are_alike_change_nothing() -> None:
    tree = scan(layer(file(b"plain/.wh..wh..opq"), file(b"plain/x"), file(b".wh.d")))
    assert tree.needs_chain
    assert adapt(tree, below(BASE)) is None


def test_an_implied_parent_takes_the_topmost_attributes() -> None:
    middle = layer(directory(b"d", 0o1770, uid=6, gid=7), directory(b"d/deep", 0o500))
    tree = scan(layer(file(b"d/deep/new")))
    fitted = adapt(tree, below(BASE, middle))
    assert fitted is not None
    found = fitted.root.children[b"d"]
    assert (found.mode, found.uid, found.gid) == (0o1770, 6, 7)
    assert found.children[b"deep"].mode == 0o500
    assert tree.root.children[b"d"].mode == 0o755


def test_a_whiteout_between_breaks_the_inheritance() -> None:
    middle = layer(file(b".wh.d"))
    assert adapt(scan(layer(file(b"d/new"))), below(BASE, middle)) is None


def test_what_a_layer_between_hides_needs_no_whiteout_and_gets_none() -> None:
    fitted = adapt(scan(layer(file(b"d/.wh.f"))), below(BASE, layer(file(b".wh.d"))))
    assert fitted is not None
    assert fitted.root.children[b"d"].children == {}


def test_without_layers_below_all_marks_go() -> None:
    tree = scan(layer(file(b".wh.x"), file(b"d/.wh..wh..opq"), file(b".wh..wh..opq")))
    fitted = adapt(tree, [])
    assert fitted is not None
    assert not fitted.root.opaque
    assert not fitted.root.children[b"d"].opaque
    assert not any(inode.kind is Kind.WHITEOUT for _, inode in fitted.walk())


def test_xattrs_come_along_and_trusted_ones_never_exist() -> None:
    lower = layer(
        pax([("SCHILY.xattr.user.k", "v"), ("SCHILY.xattr.trusted.t", "1")]) + directory(b"d")
    )
    fitted = adapt(scan(layer(file(b"d/x"))), below(lower))
    assert fitted is not None
    assert fitted.root.children[b"d"].xattrs == {b"user.k": b"v"}


def test_many_marks_in_the_deepest_directory_cost_no_more_than_in_a_shallow_one() -> None:
    deep = b"/".join([b"d"] * 1500)
    marks = [pax([("path", deep + b"/.wh.%d" % n)]) + file(b"x") for n in range(3000)]
    files = [pax([("path", deep + b"/%d" % n)]) + file(b"x") for n in range(0, 3000, 2)]
    tree = scan(layer(*marks))
    began = time.monotonic()
    fitted = adapt(tree, below(layer(*files)))
    assert time.monotonic() - began < 10
    assert fitted is not None
    left = sum(1 for _, inode in fitted.walk() if inode.kind is Kind.WHITEOUT)
    assert left == 1500


def test_symlinks_that_loop_or_leave_lead_nowhere() -> None:
    lower = layer(
        symlink(b"a", b"b"), symlink(b"b", b"a"), symlink(b"up", b"../../d"),
        directory(b"d", 0o700), symlink(b"far", b"x/" * 2000 + b"y"),
    )  # fmt: skip
    tree = scan(layer(file(b"a/x"), file(b"up/x"), file(b"far/x")))
    fitted = adapt(tree, below(lower))
    assert fitted is not None
    modes = {name: inode.mode for name, inode in fitted.root.children.items()}
    assert modes == {b"a": 0o755, b"up": 0o700, b"far": 0o755}
