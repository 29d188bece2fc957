"""Handmade layers of every kind that met an unpacker, each with what a reader must see.

Only what a row names is checked (treecheck.Row: None is anything).
"""

from __future__ import annotations

from tests.cases.beyond import beyond_containerd
from tests.cases.rows import LayerCase, is_dir, is_file, is_link
from tests.cases.sparse import SPARSE_SHAPES, filled, sparse_pax
from tests.cases.tars import (
    END,
    GNU_MAGIC,
    MTIME,
    directory,
    file,
    hardlink,
    header,
    layer,
    padded,
    pax,
    special,
    symlink,
)
from tests.treecheck import Row, Rows

NS = 1_000_000_000


CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def kinds() -> LayerCase:
    plain = layer(
        directory(b"d/", 0o1777, uid=70000, gid=4_000_000_000),
        file(b"d/setuid", b"x" * 513, mode=0o4711, uid=65535),
        file(b"d/empty"),
        symlink(b"d/link", b"../etc/x"),
        special(b"K", b"t" * 600 + b"\0") + symlink(b"d/long", b"t"),
        special(b"K", b"e" * 512) + symlink(b"d/exact", b"e"),
        header(b"d/null", type=b"3", device=(1, 3), mode=0o666),
        header(b"d/disk", type=b"4", device=(259, 300000), mode=0o660),
        header(b"d/pipe", type=b"6"),
        file(b"d/uid-1", uid=-1, gid=-2),
    )
    rows = {
        "d": is_dir(0o1777, 70000, 4_000_000_000, mtime_ns=MTIME * NS),
        "d/setuid": is_file(b"x" * 513, mode=0o4711, uid=65535, mtime_ns=MTIME * NS),
        "d/empty": is_file(b"", xattrs={}),
        "d/link": is_link("../etc/x"),
        "d/long": is_link("t" * 600),
        "d/exact": is_link("e" * 512),
        "d/null": Row("char", 0o666, rdev=(1, 3)),
        "d/disk": Row("block", 0o660, rdev=(259, 300000)),
        "d/pipe": Row("fifo", 0o644),
        "d/uid-1": Row("file", uid=0, gid=4294967294),
    }
    return LayerCase("kinds", (plain,), rows)


def names() -> LayerCase:
    long = b"n" * 255
    deep = b"/".join([b"deep" * 10] * 8)
    plain = layer(
        file(b"./dotted", b"1"),
        file(b"/rooted", b"2"),
        file(b"a//b/./c", b"3"),
        file(b"x/../cleaned", b"4"),
        file(b"trailing/", b"5"),
        header(b"v7dir/", type=b"\0", magic=b""),
        header(b"v7file", type=b"\0", magic=b"", size=1) + padded(b"6"),
        pax([("path", long)]) + file(b"short", b"7"),
        special(b"L", deep + b"\0", magic=GNU_MAGIC) + file(b"cut", b"8", magic=GNU_MAGIC),
        special(b"K", b"t" * 300 + b"\0") + special(b"L", b"both\0") + symlink(b"no", b"no"),
        file(b"tail", b"9", rest=b"pre/fix"),
        file(b"old-go", b"a", magic=GNU_MAGIC, rest=b"very/old"),
        file(b"not-utf8-\xff\xfe", b"b"),
        pax([("path", ""), ("linkpath", "")]) + file(b"empty-record", b"c"),
        file(b"new\nline", b"d"),
        file(b"x" * 100, b"e"),
        file(b"a.wh.b", b"f"),
        file(b".whale", b"g"),
    )
    deep_name = deep.decode()
    rows: Rows = {
        "dotted": is_file(b"1"), "rooted": is_file(b"2"), "a": is_dir(), "a/b": is_dir(),
        "a/b/c": is_file(b"3"), "cleaned": is_file(b"4"), "trailing": is_file(b"5"),
        "v7dir": Row("dir", 0o644), "v7file": is_file(b"6"), long.decode(): is_file(b"7"),
        "both": is_link("t" * 300), "pre": is_dir(), "pre/fix": is_dir(),
        "pre/fix/tail": is_file(b"9"), "very": is_dir(), "very/old": is_dir(),
        "very/old/old-go": is_file(b"a"), "not-utf8-\udcff\udcfe": is_file(b"b"),
        "empty-record": is_file(b"c"), "new\nline": is_file(b"d"), "x" * 100: is_file(b"e"),
        "a.wh.b": is_file(b"f"), ".whale": is_file(b"g"), deep_name: is_file(b"8"),
    }  # fmt: skip
    while deep_name := deep_name.rpartition("/")[0]:
        rows[deep_name] = is_dir()
    return LayerCase("names", (plain,), rows)


def times() -> LayerCase:
    def at(name: bytes, time: str) -> bytes:
        return pax([("mtime", time)]) + file(name)

    plain = layer(
        at(b"ns", "1712345678.123456789"),
        at(b"finer", "1.9999999999"),
        at(b"negative", "-1.5"),
        at(b"just-before", "-0.25"),
        at(b"far", "99999999999.5"),
        at(b"whole", "17."),
        file(b"base256", mtime=-86400),
        file(b"octal", mtime=0o77777777777),
        file(b"zero", mtime=0),
    )
    times_ns = {
        "ns": 1712345678123456789, "finer": 1999999999, "negative": -1500000000,
        "just-before": -250000000, "far": 99999999999500000000, "whole": 17 * NS,
        "base256": -86400 * NS, "octal": 0o77777777777 * NS, "zero": 0,
    }  # fmt: skip
    return LayerCase("times", (plain,), {k: is_file(b"", mtime_ns=v) for k, v in times_ns.items()})


def xattrs() -> LayerCase:
    def with_xattrs(entry: bytes, *pairs: tuple[str, bytes]) -> bytes:
        return pax([(f"SCHILY.xattr.{name}", value) for name, value in pairs]) + entry

    shared = ("user.shared", b"the same on many files")
    binary = bytes(range(256)) + b"=\n="
    acl = bytes.fromhex(
        "02000000" "01000600ffffffff" "02000700e8030000" "04000400ffffffff" "10000700ffffffff"
        "20000400ffffffff"
    )  # fmt: skip
    changed = bytes.fromhex(
        "02000000" "01000700ffffffff" "02000700e8030000" "04000400ffffffff" "10000500ffffffff"
        "20000000ffffffff"
    )  # fmt: skip
    plain = layer(
        with_xattrs(file(b"f", b"x"), ("user.binary", binary), ("user.empty", b""), shared),
        with_xattrs(file(b"cap"), ("security.capability", CAPABILITY), shared),
        with_xattrs(directory(b"dir"), ("user.d", b"1"), ("trusted.overlay.opaque", b"y"), shared),
        with_xattrs(
            file(b"dropped"), ("trusted.x", b"1"), ("com.apple.x", b"1"), ("system.y", b"")
        ),
        with_xattrs(file(b"dropped-too"), ("system.y", b""), ("trusted.overlay.metacopy", b"")),
        with_xattrs(symlink(b"link", b"f"), ("user.no", b"1"), ("security.sel", b"ctx\0")),
        with_xattrs(file(b"big"), *[(f"user.{n}", bytes([n]) * 900) for n in range(3)]),
        pax([("LIBARCHIVE.xattr.user.l", "YQ==")]) + file(b"libarchive"),
        with_xattrs(file(b"acl", mode=0o674), ("system.posix_acl_access", acl)),
        with_xattrs(file(b"acl-chmod", mode=0o750), ("system.posix_acl_access", acl)),
        with_xattrs(directory(b"acl-dir"), ("system.posix_acl_default", acl)),
    )
    pair = {"user.shared": shared[1]}
    rows: Rows = {
        "f": is_file(b"x", xattrs={"user.binary": binary, "user.empty": b"", **pair}),
        "cap": is_file(b"", xattrs={"security.capability": CAPABILITY, **pair}),
        "dir": is_dir(xattrs={"user.d": b"1", **pair}),
        "dropped": is_file(b"", xattrs={}),
        "dropped-too": is_file(b"", xattrs={}),
        "link": Row("symlink", xattrs={"security.sel": b"ctx\0"}),
        "big": is_file(b"", xattrs={f"user.{n}": bytes([n]) * 900 for n in range(3)}),
        "libarchive": is_file(b"", xattrs={}),
        "acl": is_file(b"", mode=0o674, xattrs={"system.posix_acl_access": acl}),
        "acl-chmod": is_file(b"", mode=0o750, xattrs={"system.posix_acl_access": changed}),
        "acl-dir": is_dir(xattrs={"system.posix_acl_default": acl}),
    }
    return LayerCase("xattrs", (plain,), rows)


def hard_links() -> LayerCase:
    plain = layer(
        file(b"target", b"content"),
        hardlink(b"after", b"/target"),
        file(b"old", b"kept"),
        hardlink(b"keeps-old", b"old"),
        file(b"old", b"new content"),
        directory(b"d"),
        symlink(b"way", b"d"),
        file(b"d/f", b"via"),
        hardlink(b"via-symlink", b"way/f"),
        symlink(b"sym", b"nowhere"),
        hardlink(b"sym2", b"sym"),
        header(b"dev", type=b"3", device=(1, 5)),
        hardlink(b"dev2", b"dev"),
        hardlink(b"twice", b"target"),
        hardlink(b"twice", b"target"),
        pax([("SCHILY.xattr.security.capability", CAPABILITY)]) + file(b"cap", b"c", mode=0o755),
        hardlink(b"cap2", b"cap", mode=0o755),
    )
    group = is_file(b"content", hardlink_of="after")
    rows: Rows = {
        "after": is_file(b"content", hardlink_of=""), "target": group, "twice": group,
        "old": is_file(b"new content", hardlink_of=""),
        "keeps-old": is_file(b"kept", hardlink_of=""), "d": is_dir(), "way": is_link("d"),
        "d/f": is_file(b"via", hardlink_of=""), "via-symlink": is_file(b"via", hardlink_of="d/f"),
        "sym": Row("symlink", link="nowhere", hardlink_of=""),
        "sym2": Row("symlink", link="nowhere", hardlink_of="sym"),
        "dev": Row("char", rdev=(1, 5), hardlink_of=""),
        "dev2": Row("char", rdev=(1, 5), hardlink_of="dev"),
        "cap": is_file(b"c", xattrs={"security.capability": CAPABILITY}, hardlink_of=""),
        "cap2": is_file(b"c", xattrs={"security.capability": CAPABILITY}, hardlink_of="cap"),
    }  # fmt: skip
    return LayerCase("hard links", (plain,), rows)


def duplicates() -> LayerCase:
    plain = layer(
        file(b"f", b"x" * 3000) + file(b"f", b"second"),
        hardlink(b"keeps", b"f"),
        file(b"./f", b"third", mode=0o600),
        directory(b"d") + file(b"d/x", b"1") + directory(b"d", 0o700, uid=4, mtime=MTIME + 3),
        file(b"d/x"),
        file(b"to-dir", b"file") + directory(b"to-dir") + file(b"to-dir/y", b"y"),
        directory(b"to-link") + file(b"to-link/z", b"z") + symlink(b"to-link", b"d"),
        file(b"to-link/through", b"lands in d"),
        symlink(b"link", b"one") + symlink(b"link", b"two"),
        header(b"node", type=b"3", device=(1, 3)) + header(b"node", type=b"3", device=(1, 5)),
        file(b"late/child", b"c") + directory(b"late", 0o711, uid=9),
    )
    rows: Rows = {
        "f": is_file(b"third", mode=0o600), "keeps": is_file(b"second", mode=0o644),
        "d": is_dir(0o700, 4, mtime_ns=(MTIME + 3) * NS), "d/x": is_file(b""),
        "to-dir": is_dir(), "to-dir/y": is_file(b"y"), "to-link": is_link("d"),
        "d/through": is_file(b"lands in d"), "link": is_link("two"),
        "node": Row("char", rdev=(1, 5)), "late": is_dir(0o711, 9), "late/child": is_file(b"c"),
    }  # fmt: skip
    return LayerCase("duplicates", (plain,), rows)


def symlinked_parents() -> LayerCase:
    plain = layer(
        directory(b"usr/lib64"),
        symlink(b"lib64", b"usr/lib64"),
        file(b"lib64/libx.so", b"x"),
        directory(b"lib64/sub", 0o700, uid=4),
        symlink(b"abs", b"/opt/real"),
        file(b"abs/deep/file", b"far"),
        directory(b"d1"),
        symlink(b"d1/up", b".."),
        file(b"d1/up/via-up", b"up"),
        symlink(b"d1/out", b"../../../../etc"),
        file(b"d1/out/inside", b"clamped"),
        symlink(b"l1", b"l2") + symlink(b"l2", b"usr") + file(b"l1/chained", b"chain"),
        symlink(b"twisted", b"nope/../usr/./lib64/") + file(b"twisted/t", b"t"),
    )
    rows: Rows = {
        "usr": is_dir(), "usr/lib64": is_dir(), "lib64": is_link("usr/lib64"),
        "usr/lib64/libx.so": is_file(b"x"), "usr/lib64/sub": is_dir(0o700, 4),
        "abs": is_link("/opt/real"), "opt": is_dir(), "opt/real": is_dir(),
        "opt/real/deep": is_dir(), "opt/real/deep/file": is_file(b"far"), "d1": is_dir(),
        "d1/up": is_link(".."), "via-up": is_file(b"up"), "d1/out": is_link("../../../../etc"),
        "etc": is_dir(), "etc/inside": is_file(b"clamped"), "l1": is_link("l2"),
        "l2": is_link("usr"), "usr/chained": is_file(b"chain"),
        "twisted": is_link("nope/../usr/./lib64/"), "usr/lib64/t": is_file(b"t"),
    }  # fmt: skip
    return LayerCase("symlinked parents", (plain,), rows)


def archive_ends() -> list[LayerCase]:
    entry = header(b"f", size=700) + b"e" * 700
    wanted: Rows = {"f": is_file(b"e" * 700)}
    other = file(b"hidden", b"h")
    ends = {
        "cut right behind its data": entry,
        "cut within the padding": entry + bytes(100),
        "without end": padded(entry),
        "one zero block": padded(entry) + bytes(512),
        "a second archive behind the end": padded(entry) + END + bytes(3 << 20) + other + END,
        "junk behind the end": padded(entry) + END + b"junk" * 999,
        "padding that is not zero": entry + b"\xaa" * 324 + END,
        "an extended header and nothing after it": padded(entry) + pax([("path", "x")]) + END,
    }
    cases = [LayerCase(name, (plain,), wanted) for name, plain in ends.items()]
    nothing: Rows = {}
    cases += [
        LayerCase("empty layers", (b"", END, bytes(10240), layer(directory(b"./", 0o700))), nothing)
    ]
    return cases


def without_names() -> LayerCase:
    plain = layer(
        directory(b""), directory(b"/", 0o700), directory(b"./."), file(b"", b"x" * 700),
        file(b"./.", b"y" * 600), header(b".", type=b"Z"), directory(b"x"), file(b"x/f", b"1"),
    )  # fmt: skip
    return LayerCase("without names", (plain,), {"x": is_dir(), "x/f": is_file(b"1")})


def global_headers() -> LayerCase:
    records = [("comment", "c"), ("uid", "999"), ("mtime", "1"), ("path", "evil"), ("size", "3")]
    plain = layer(
        pax(records, b"g"),
        directory(b"tmp", 0o1777),
        pax([*records, ("note", "n" * 1500)], b"g"),
        file(b"plain", b"untouched"),
        pax([("uid", "1234567")]) + pax(records, b"g") + file(b"f", b"1"),
    )
    rows: Rows = {
        "tmp": is_dir(0o1777, mtime_ns=MTIME * NS), "plain": is_file(b"untouched", uid=0),
        "f": is_file(b"1", uid=1234567),
    }  # fmt: skip
    return LayerCase("global headers", (plain,), rows)


def sizes() -> LayerCase:
    many = [file(b"many/%05d" % n, b"%d" % n) for n in range(1500)]
    around = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537]
    data = {f"size-{n}": bytes([n % 251 + 1]) * n for n in around}
    by_pax = pax([("size", "1300")]) + header(b"by-pax", size=7) + padded(b"p" * 1300)
    parts = [file(name.encode(), content) for name, content in data.items()]
    rows: Rows = {name: is_file(content) for name, content in data.items()}
    rows |= {f"many/{n:05}": is_file(b"%d" % n) for n in range(1500)}
    rows |= {"many": is_dir(), "by-pax": is_file(b"p" * 1300)}
    base256 = bytearray(header(b"base256", size=4))
    base256[124:136] = b"\x80" + (4).to_bytes(11, "big")
    base256[148:156] = b" " * 8
    base256[148:156] = b"%06o\0 " % sum(base256)
    rows["base256"] = is_file(b"four")
    return LayerCase(
        "sizes", (layer(*parts, by_pax, bytes(base256), padded(b"four"), *many),), rows
    )


def sparse_files() -> LayerCase:
    parts: list[bytes] = []
    rows: Rows = {}
    for shape, (pieces, size) in SPARSE_SHAPES.items():
        for version in ("0.0", "0.1", "1.0"):
            parts.append(sparse_pax(version, f"{shape}-{version}".encode(), pieces, size))
            rows[f"{shape}-{version}"] = is_file(filled(pieces, size))
    parts.append(file(b"after", b"still in step"))
    rows["after"] = is_file(b"still in step")
    return LayerCase("sparse files", (layer(*parts),), rows)


def in_one_layer() -> list[LayerCase]:
    """All cases of a single layer."""
    return [
        kinds(), names(), times(), xattrs(), hard_links(), duplicates(), symlinked_parents(),
        *archive_ends(), without_names(), global_headers(), sizes(), sparse_files(),
        *beyond_containerd(),
    ]  # fmt: skip
