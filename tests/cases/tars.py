"""Tar bytes made by hand, header field by header field, so that odd and false ones can be made.

Each function returns whole 512-byte blocks; a layer is their concatenation and ``END``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MTIME = 1_700_000_000
END = bytes(1024)

Records = Iterable[tuple[str | bytes, str | bytes]]


def padded(data: bytes) -> bytes:
    """Filled up with zeros to whole blocks."""
    return data + bytes(-len(data) % 512)


def octal(value: int, width: int) -> bytes:
    """An octal field, NUL at its end; base-256 if it does not fit or is negative."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return (value % (1 << (8 * width - 1)) | 1 << (8 * width - 1)).to_bytes(width, "big")


def header(
    name: bytes,
    *,
    type: bytes = b"0",
    size: int = 0,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = MTIME,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
    magic: bytes = b"ustar\x0000",
    rest: bytes = b"",
    checksum: int | None = None,
) -> bytes:
    """One header; ``rest`` are the bytes from 345 on (a ustar prefix, GNU's sparse map)."""
    block = bytearray(
        name[:100].ljust(100, b"\0")
        + octal(mode, 8) + octal(uid, 8) + octal(gid, 8) + octal(size, 12) + octal(mtime, 12)
        + b" " * 8 + type + link[:100].ljust(100, b"\0") + magic.ljust(8, b"\0") + bytes(64)
        + octal(device[0], 8) + octal(device[1], 8) + rest
    )  # fmt: skip
    block = block.ljust(512, b"\0")
    block[148:156] = b"%06o\0 " % (sum(block) if checksum is None else checksum)
    return bytes(block)


GNU_MAGIC = b"ustar  \0"


def record(key: str | bytes, value: str | bytes) -> bytes:
    """One pax record."""
    key = key.encode() if isinstance(key, str) else key
    value = value.encode() if isinstance(value, str) else value
    body = b" " + key + b"=" + value + b"\n"
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body


def special(type: bytes, data: bytes, *, magic: bytes = b"ustar\x0000") -> bytes:
    """An entry that speaks of the next: pax (x), global (g), GNU's long name (L) or link (K)."""
    return header(b"././@special", type=type, size=len(data), magic=magic) + padded(data)


def pax(records: Records, type: bytes = b"x") -> bytes:
    """An extended header with these records, in this order, keys repeated or not."""
    return special(type, b"".join(record(key, value) for key, value in records))


def file(name: bytes, data: bytes = b"", **fields: Any) -> bytes:
    """A regular file."""
    return header(name, size=len(data), **fields) + padded(data)


def directory(name: bytes, mode: int = 0o755, **fields: Any) -> bytes:
    """A directory."""
    return header(name, type=b"5", mode=mode, **fields)


def symlink(name: bytes, target: bytes, **fields: Any) -> bytes:
    """A symbolic link."""
    return header(name, type=b"2", mode=0o777, link=target, **fields)


def hardlink(name: bytes, target: bytes, **fields: Any) -> bytes:
    """A hard link."""
    return header(name, type=b"1", link=target, **fields)


def layer(*parts: bytes) -> bytes:
    """A whole plain layer."""
    return b"".join(parts) + END
