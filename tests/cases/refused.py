"""Handmade layers that no tree may come of, each with a word that the refusal must have."""

from __future__ import annotations

from typing import NamedTuple

from tests.cases.sparse import sparse_pax
from tests.cases.tars import (
    GNU_MAGIC,
    directory,
    file,
    hardlink,
    header,
    layer,
    pax,
    special,
    symlink,
)


class Refused(NamedTuple):
    """A plain layer and a part of what its refusal says."""

    name: str
    plain: bytes
    word: str


def _names() -> list[Refused]:
    out = "leaves the layer's root"
    return [
        Refused("a name that climbs out", layer(file(b"../x")), out),
        Refused("an absolute name that climbs out", layer(file(b"/../etc/passwd")), out),
        Refused("a name that climbs out in the middle", layer(file(b"a/../../x")), out),
        Refused("a hard link that climbs out", layer(hardlink(b"x", b"../../etc/passwd")), out),
        Refused("a pax name that climbs out", layer(pax([("path", "../x")]) + file(b"y")), out),
        Refused("a long component", layer(pax([("path", "n" * 256)]) + file(b"x")), "256 bytes"),
        Refused("a long parent", layer(pax([("path", "n" * 256 + "/x")]) + file(b"x")), "256"),
        Refused("a long path", layer(pax([("path", "a/" * 2100 + "b")]) + file(b"x")), "4201"),
        Refused("NUL in a pax name", layer(pax([("path", "a\0b")]) + file(b"x")), "NUL"),
        Refused("a whiteout of nothing at all", layer(file(b".wh.")), "invalid whiteout name"),
        Refused("a whiteout of .", layer(file(b"d/.wh..")), "invalid whiteout name"),
        Refused("a whiteout of ..", layer(file(b"d/.wh...")), "invalid whiteout name"),
        Refused("below a file", layer(file(b"f") + file(b"f/x")), "no directory"),
        Refused("below a loop", layer(symlink(b"l", b"l") + file(b"l/x")), "too many symlinks"),
    ]


def _links() -> list[Refused]:
    return [
        Refused("a link to nothing there", layer(hardlink(b"x", b"y")), "does not have"),
        Refused(
            "links in a circle", layer(hardlink(b"x", b"y") + hardlink(b"y", b"x")), "not have"
        ),
        Refused("a link to itself", layer(file(b"x") + hardlink(b"x", b"./x")), "itself"),
        Refused(
            "a link to a directory", layer(directory(b"d") + hardlink(b"x", b"d")), "directory"
        ),
        Refused("a link to the root", layer(hardlink(b"x", b"/")), "directory"),
        Refused("a link without a target", layer(hardlink(b"x", b"")), "to nothing"),
        Refused("a symlink to nothing", layer(symlink(b"x", b"")), "to nothing"),
        Refused(
            "a symlink that is too long",
            layer(special(b"K", b"t" * 4096, magic=GNU_MAGIC) + symlink(b"x", b"")),
            "4096 bytes",
        ),
    ]


def _false_mode() -> bytes:
    block = bytearray(header(b"f").replace(b"0000644", b"0000698"))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return layer(bytes(block))


def _headers() -> list[Refused]:
    cut = file(b"f", b"x" * 1000)
    negative = header(b"f", size=-1)
    return [
        Refused("no tar at all", b"\x7fELF" * 1000, "checksum"),
        Refused("a wrong checksum", header(b"f", checksum=1), "checksum"),
        Refused("half a header", file(b"f") + b"half", "within a header"),
        Refused("data cut short", cut[:1000], "the stream ends 512 bytes before"),
        Refused("a size that outruns the stream", header(b"f", size=5000) + bytes(512), "before"),
        Refused("a size beyond all bounds", header(b"f", size=1 << 60), "declares"),
        Refused("a size below zero", negative, "declares"),
        Refused("an unknown type", layer(header(b"f", type=b"Z")), "unknown type 'Z'"),
        Refused("a volume label", layer(header(b"f", type=b"V")), "unknown type 'V'"),
        Refused("one zero block, then more", bytes(512) + file(b"f"), "block of zeros"),
        Refused(
            "a device beyond 12 bits", layer(header(b"d", type=b"3", device=(4096, 1))), "4096"
        ),
        Refused("a uid of 33 bits", layer(file(b"f", uid=1 << 32)), "uid"),
        Refused("an octal that is none", _false_mode(), "neither octal"),
    ]


def _extended() -> list[Refused]:
    def of(data: bytes) -> bytes:
        return layer(special(b"x", data) + file(b"f"))

    def xattr(name: str, value: bytes) -> bytes:
        return layer(pax([(f"SCHILY.xattr.{name}", value)]) + file(b"f"))

    return [
        Refused("a record without length", of(b"path=x\n"), "length"),
        Refused("a record that is longer than all", of(b"99 path=x\n"), "lies"),
        Refused("a record without newline", of(b"10 path=xx"), "lies"),
        Refused("a record without key", of(b"6 =ab\n"), "no key"),
        Refused("a record without equals sign", of(b"7 path\n"), "no key"),
        Refused("a size that is no number", layer(pax([("size", "1e9")]) + file(b"f")), "size"),
        Refused("a negative size", layer(pax([("size", "-1")]) + file(b"f")), "declares"),
        Refused("a time that is none", layer(pax([("mtime", "1.2.3")]) + file(b"f")), "mtime"),
        Refused("a time of many digits", layer(pax([("mtime", "9" * 30)]) + file(b"f")), "mtime"),
        Refused("a header of 2 MiB", special(b"x", bytes(2 << 20)), "extended header of"),
        Refused("a false capability", xattr("security.capability", b"\1\0\0\2x"), "capability"),
        Refused("an xattr without name", xattr("user.", b"x"), "no name"),
        Refused("an xattr with a long name", xattr("user." + "n" * 251, b"x"), "255"),
        Refused("an xattr that is too long", xattr("user.x", bytes(65536)), "65536"),
        Refused("a false ACL", xattr("system.posix_acl_access", b"\2\0\0\0\1"), "malformed"),
    ]


def _sparse() -> list[Refused]:
    far = [(0, b"x"), (1 << 62, b"y" * 512)]
    scattered = [(n << 30, b"xy") for n in range(2000)]
    return [
        Refused(
            "pieces that overlap", sparse_pax("0.1", b"s", [(0, b"xx"), (1, b"y")], 9), "overlap"
        ),
        Refused(
            "a piece behind the end", sparse_pax("0.1", b"s", [(5, b"xx")], 6), "leave the file"
        ),
        Refused(
            "a map of less than is stored",
            pax([("GNU.sparse.map", "0,1"), ("GNU.sparse.numblocks", "1")]) + file(b"s", b"xy"),
            "stored",
        ),
        Refused(
            "a map whose count lies",
            pax([("GNU.sparse.map", "0,1"), ("GNU.sparse.numblocks", "2")]) + file(b"s", b"x"),
            "count",
        ),
        Refused("a map that is longer than its entry", _map_alone(b"7\n0\n"), "longer than"),
        Refused("a map that counts beyond all", _map_alone(b"99999999\n"), "99999999 blocks"),
        Refused("a sparse directory", _sparse_directory(), "no data"),
        Refused("old sparse in ustar", header(b"s", type=b"S"), "GNU"),
        Refused("a file of exabytes", sparse_pax("1.0", b"s", far, 1 << 62 | 512), "metadata"),
        Refused(
            "bytes scattered over terabytes", sparse_pax("1.0", b"s", scattered, 1 << 41), "meta"
        ),
    ]


def _map_alone(text: bytes) -> bytes:
    records = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", "9")]
    return layer(pax(records) + file(b"s", text.ljust(512, b"\0")))


def _sparse_directory() -> bytes:
    return layer(pax([("GNU.sparse.map", "0,0"), ("GNU.sparse.numblocks", "1")]) + directory(b"d"))


def all_refused() -> list[Refused]:
    """All of them."""
    return [*_names(), *_links(), *_headers(), *_extended(), *_sparse()]
