"""Handmade stacks of layers: whiteouts, opaque marks, implied parents, and what replaces what."""

from __future__ import annotations

from tests.cases.rows import LayerCase, is_dir, is_file, is_link
from tests.cases.tars import MTIME, directory, file, hardlink, header, layer, pax, symlink
from tests.treecheck import Rows

XATTR = {"user.k": b"v"}


def usrmerge() -> LayerCase:
    base = layer(
        directory(b"usr"),
        pax([("SCHILY.xattr.user.k", "v")]) + directory(b"usr/lib", 0o2751, uid=7, gid=8),
        file(b"usr/lib/base.so", b"base"),
        symlink(b"lib", b"usr/lib"),
        symlink(b"sbin", b"/usr/sbin"),
        directory(b"usr/sbin", 0o711, uid=3),
        symlink(b"dangling", b"not/there"),
    )
    upper = layer(
        file(b"lib/extra.so", b"extra"),
        file(b"dangling/x", b"d"),
    )
    top = layer(
        file(b"lib/extra2.so", b"extra2"), directory(b"sbin", 0o700), file(b"sbin/new", b"n")
    )
    rows: Rows = {
        "usr": is_dir(), "usr/lib": is_dir(0o2751, 7, 8, xattrs=XATTR),
        "usr/lib/base.so": is_file(b"base"), "lib": is_dir(0o2751, 7, 8, xattrs=XATTR),
        "lib/extra.so": is_file(b"extra"), "lib/extra2.so": is_file(b"extra2"),
        "usr/sbin": is_dir(0o711, 3), "sbin": is_dir(0o700), "sbin/new": is_file(b"n"),
        "dangling": is_dir(), "dangling/x": is_file(b"d"),
    }  # fmt: skip
    return LayerCase("usrmerge", (base, upper, top), rows)


def blocked_parents() -> LayerCase:
    """Implied directories where the layers below have what leads nowhere: the defaults."""
    base = layer(symlink(b"loop", b"loop"), file(b"blocked", b"a file"))
    upper = layer(file(b"loop/x", b"l"), file(b"blocked/x/y", b"b"))
    rows: Rows = {
        "loop": is_dir(), "loop/x": is_file(b"l"), "blocked": is_dir(), "blocked/x": is_dir(),
        "blocked/x/y": is_file(b"b"),
    }  # fmt: skip
    return LayerCase("blocked parents", (base, upper), rows)


def implied_parents() -> LayerCase:
    base = layer(
        pax([("SCHILY.xattr.user.k", "v")]) + directory(b"a", 0o1770, uid=7, gid=8),
        directory(b"a/b", 0o700, uid=70000),
        file(b"a/b/low", b"low"),
    )
    rows: Rows = {
        "a": is_dir(0o1770, 7, 8, xattrs=XATTR), "a/b": is_dir(0o700, 70000),
        "a/b/low": is_file(b"low"), "a/b/c": is_dir(), "a/b/c/d": is_file(b"d"),
        "a/b/c/e": is_file(b"e"),
    }  # fmt: skip
    return LayerCase(
        "implied parents",
        (base, layer(file(b"a/b/c/d", b"d")), layer(file(b"a/b/c/e", b"e"))),
        rows,
    )


def whiteouts() -> LayerCase:
    names = b"abcdefg"
    base = layer(
        directory(b"d"),
        *[file(b"d/" + bytes([n]), b"x") for n in names],
        directory(b"gone"), file(b"gone/inside"), file(b"gone-too"),
        directory(b"again", 0o700), file(b"again/old", b"old"),
    )  # fmt: skip
    upper = layer(
        file(b"d/.wh.a"),
        hardlink(b"d/.wh.b", b"d/.wh.a"),
        hardlink(b"d/.wh.c", b".wh..wh.aufs"),
        symlink(b"d/.wh.d", b"whatever"),
        directory(b"d/.wh.e"),
        header(b"d/.wh.f", type=b"6"),
        file(b"d/after", b"in step"),
        file(b".wh.gone", b"with data"),
        file(b"./.wh.gone-too"),
    )
    rows: Rows = {
        "d": is_dir(), "d/g": is_file(b"x"), "d/after": is_file(b"in step"),
        "again": is_dir(0o700), "again/old": is_file(b"old"),
    }  # fmt: skip
    return LayerCase("whiteouts", (base, upper), rows)


def whiteouts_of_their_own_layer() -> LayerCase:
    """layer.md: a whiteout hides lower layers only, whatever the order of the entries."""
    base = layer(
        directory(b"first"), file(b"first/old", b"1"), directory(b"last"), file(b"last/old", b"2"),
        file(b"file", b"old"), directory(b"implied", 0o700), file(b"implied/old"),
    )  # fmt: skip
    upper = layer(
        file(b".wh.implied"), file(b"implied/new", b"i"),
        file(b".wh.first"), directory(b"first", 0o711), file(b"first/new", b"n"),
        directory(b"last", 0o712), file(b"last/new", b"m"), file(b".wh.last"),
        file(b"file", b"new"), file(b".wh.file"),
    )  # fmt: skip
    rows: Rows = {
        "first": is_dir(0o711), "first/new": is_file(b"n"), "last": is_dir(0o712),
        "last/new": is_file(b"m"), "file": is_file(b"new"), "implied": is_dir(0o700),
        "implied/new": is_file(b"i"),
    }  # fmt: skip
    return LayerCase("whiteouts of their own layer", (base, upper), rows)


def whiteouts_of_nothing() -> LayerCase:
    base = layer(
        directory(b"etc"), file(b"etc/a", b"a"), file(b"tmp/.wh..wh..opq"), file(b"opt/.wh.none"),
        file(b".wh.root-ghost"), header(b"forged", type=b"3"),
    )  # fmt: skip
    upper = layer(
        file(b"var/cache/apt/.wh..wh..opq"), file(b"var/lib/.wh.ghost"), file(b"etc/.wh.ghost"),
        file(b".wh.rootghost"), file(b"etc/a/../.wh.ghost2"), header(b"etc/forged", type=b"3"),
    )  # fmt: skip
    rows: Rows = {
        "etc": is_dir(), "etc/a": is_file(b"a"), "opt": is_dir(), "tmp": is_dir(xattrs={}),
        "var": is_dir(), "var/cache": is_dir(), "var/cache/apt": is_dir(xattrs={}),
        "var/lib": is_dir(),
    }  # fmt: skip
    return LayerCase("whiteouts of nothing", (base, upper), rows)


def opaque() -> LayerCase:
    base = layer(
        directory(b"d", 0o1777), file(b"d/a", b"a"), directory(b"d/sub", 0o750, uid=3),
        file(b"d/sub/b", b"b"), directory(b"e"), file(b"e/x", b"x"), directory(b"both"),
        file(b"both/x", b"x"),
    )  # fmt: skip
    upper = layer(
        file(b"d/sub/c", b"c"), file(b"d/n1", b"1"), file(b"d/.wh..wh..opq"), file(b"d/n2", b"2"),
        file(b"e/.wh..wh..opqX"), file(b"e/.wh..opq"), file(b"e/.wh.wh..opq"),
        file(b"e/.whale", b"a whale"), file(b"e/a.wh.b", b"b"), file(b"both/.wh..wh..opq"),
        file(b"both/.wh.x"), file(b"both/.wh.y"), file(b"both/new", b"n"),
    )  # fmt: skip
    rows: Rows = {
        "d": is_dir(0o1777, xattrs={}), "d/n1": is_file(b"1"), "d/n2": is_file(b"2"),
        "d/sub": is_dir(0o750, 3), "d/sub/c": is_file(b"c"), "e": is_dir(), "e/x": is_file(b"x"),
        "e/.whale": is_file(b"a whale"), "e/a.wh.b": is_file(b"b"), "both": is_dir(),
        "both/new": is_file(b"n"),
    }  # fmt: skip
    return LayerCase("opaque", (base, upper), rows)


def opaque_root() -> LayerCase:
    base = layer(
        directory(b"d"), file(b"d/old", b"o"), file(b"f", b"f"), directory(b"gone"), file(b"same")
    )
    upper = layer(file(b"d/new", b"n"), file(b".wh..wh..opq"), file(b"same", b"new"))
    rows: Rows = {
        "d": is_dir(xattrs={}), "d/new": is_file(b"n"), "same": is_file(b"new"),
        "top": is_file(b"t"),
    }  # fmt: skip
    return LayerCase("opaque root", (base, upper, layer(file(b"top", b"t"))), rows)


def replaced_across_layers() -> LayerCase:
    base = layer(
        directory(b"was-dir"), file(b"was-dir/x", b"x"), file(b"was-file", b"f"),
        file(b"a", b"one"), hardlink(b"b", b"a"), directory(b"was-dir-2"), symlink(b"l", b"a"),
    )  # fmt: skip
    upper = layer(
        file(b"was-dir", b"now a file"), directory(b"was-file", 0o711),
        file(b"was-file/child", b"c"), file(b"b", b"two"), symlink(b"was-dir-2", b"was-file"),
        directory(b"l", 0o701, mtime=MTIME + 1),
    )  # fmt: skip
    rows: Rows = {
        "was-dir": is_file(b"now a file"), "was-file": is_dir(0o711),
        "was-file/child": is_file(b"c"), "a": is_file(b"one"), "b": is_file(b"two"),
        "was-dir-2": is_link("was-file"), "l": is_dir(0o701, mtime_ns=(MTIME + 1) * 10**9),
    }  # fmt: skip
    return LayerCase("replaced across layers", (base, upper), rows)


def of_several_layers() -> list[LayerCase]:
    """All cases of several layers."""
    return [
        usrmerge(), blocked_parents(), implied_parents(), whiteouts(),
        whiteouts_of_their_own_layer(), whiteouts_of_nothing(), opaque(), opaque_root(),
        replaced_across_layers(),
    ]  # fmt: skip
