"""One 512-byte tar header: checksum, numbers, names, in all dialects that images use.

Pure. Formats: POSIX.1-1988 ustar, POSIX.1-2001 pax, GNU tar's manual ("Basic Tar Format"), star's
variant, and V7; where they leave room this reads what Go's archive/tar reads, because
containerd's unpacker is built on it.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from zlib import adler32

from snapshotter.errors import RefusedError

_FIELDS = Struct("100s8s8s8s12s12s8sB100s6s2s64s8s8s155s12s")
_ZEROS = bytes(512)
_GNU = b"ustar "
_USTAR = b"ustar\0"

HEADER_ONLY = frozenset(b"123456")
"""Types that have no data, whatever their size field says."""


class Header:
    """The fields of an entry, later overlaid by its extended headers.

    ``type`` is the type byte, ``mtime_ns`` nanoseconds since 1970. ``raw`` is the block itself.
    """

    __slots__ = (
        "devmajor",
        "devminor",
        "gid",
        "link",
        "mode",
        "mtime_ns",
        "name",
        "raw",
        "size",
        "type",
        "uid",
    )

    def __init__(self, raw: bytes) -> None:
        fields = _FIELDS.unpack(raw)
        name = fields[0]
        self.raw = raw
        self.type: int = fields[7]
        self.name: bytes = text(name)
        self.link: bytes = text(fields[8])
        self.size = number(fields[4])
        self.mode = number(fields[1])
        self.uid = number(fields[2])
        self.gid = number(fields[3])
        self.mtime_ns = number(fields[5]) * 1_000_000_000
        self.devmajor = self.devminor = 0
        magic = fields[9]
        if magic in (_USTAR, _GNU):
            self._read_ustar(magic, fields)

    def _read_ustar(self, magic: bytes, fields: tuple[bytes, ...]) -> None:
        if magic == _GNU and fields[10] != b" \0":
            return  # neither of the two: V7
        self.devmajor = number(fields[12])
        self.devminor = number(fields[13])
        prefix = fields[14]
        if magic == _GNU:
            if prefix[0] == 0 and prefix[12] == 0:
                return
            prefix = self._prefix_of_old_go(prefix)
        elif self.raw[508:] == b"tar\0":
            prefix = prefix[:131]
        prefix = text(prefix)
        if prefix:
            self.name = prefix + b"/" + self.name

    @staticmethod
    def _prefix_of_old_go(prefix: bytes) -> bytes:
        """GNU has times here; Go before 1.8 wrote a name's prefix into them by mistake."""
        try:
            for field in (prefix[:12], prefix[12:24]):
                if field[0]:
                    number(field)
        except RefusedError:
            cut = text(prefix)
            return cut if cut.isascii() else b""
        return b""


def text(field: bytes) -> bytes:
    """A string field: ends at its first NUL, or fills the field."""
    end = field.find(0)
    return field if end < 0 else field[:end]


@lru_cache(maxsize=16384)
def number(field: bytes) -> int:
    """A numeric field: octal digits between blanks and NULs, or GNU's base-256 (may be negative).

    Raises RefusedError if it is neither, or does not fit 64 bits.
    """
    first = field[0]
    if first & 0x80:
        value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        if first & 0x40:
            value -= 1 << (8 * len(field) - 1)
        if not -(1 << 63) <= value < 1 << 63:
            raise RefusedError(f"a number of more than 64 bits: {field.hex()}")
        return value
    digits = text(field.strip(b" \0"))
    if not digits:
        return 0
    if digits.isdigit():
        try:
            value = int(digits, 8)
        except ValueError:
            value = -1
        if 0 <= value < 1 << 63:
            return value
    raise RefusedError(f"a number that is neither octal nor base-256: {field!r}")


def is_zero(block: bytes) -> bool:
    """Whether the block is one of the zero blocks that end an archive."""
    return block == _ZEROS


def checksum_fits(block: bytes) -> bool:
    """Whether the header's checksum is right: the sum of its bytes, the field itself as blanks.

    Old Sun tars summed signed bytes; both count. Adler-32's lower half is a sum modulo 65521,
    exact for half a block, and an order of magnitude faster than adding up in Python.
    """
    try:
        stored = number(block[148:156])
    except RefusedError:
        return False
    total = (adler32(block[:148]) & 0xFFFF) + (adler32(block[156:404]) & 0xFFFF)
    total += (adler32(block[404:]) & 0xFFFF) - 3 + 8 * 0x20
    if stored == total:
        return True
    high = sum(1 for byte in block[:148] + block[156:] if byte > 127)
    return stored == total - 256 * high
