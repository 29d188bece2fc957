"""Extended headers: the records of a pax header and what they change in an entry.

Pure. Format: POSIX.1-2001 pax ("%d %s=%s\\n", length counts itself), GNU's sparse records and
star's SCHILY.xattr.*. libarchive's own LIBARCHIVE.xattr.* are left alone, as by containerd: bsdtar
writes them beside the SCHILY ones.
"""

from __future__ import annotations

from snapshotter.errors import RefusedError
from snapshotter.image.tar_header import Header

XATTR_PREFIX = b"SCHILY.xattr."
SPARSE_MAP = b"GNU.sparse.map"
_SPARSE_PAIR = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
_TEXT_KEYS = frozenset((b"path", b"linkpath", b"uname", b"gname"))
_INT64_DIGITS = 19


def parse_records(data: bytes) -> dict[bytes, bytes]:
    """The records of one extended header; the last of a key wins.

    The pairs of GNU's sparse format 0.0, which repeat their keys, come out as one map as format
    0.1 has it. RefusedError says what is malformed.
    """
    records: dict[bytes, bytes] = {}
    pairs: list[bytes] = []
    at = 0
    while at < len(data):
        key, value, at = _record(data, at)
        if key in _SPARSE_PAIR:
            if key != _SPARSE_PAIR[len(pairs) % 2] or b"," in value:
                raise RefusedError("pax: sparse offsets and lengths out of turn")
            pairs.append(value)
        else:
            records[key] = value
    if pairs:
        records[SPARSE_MAP] = b",".join(pairs)
    return records


def _record(data: bytes, at: int) -> tuple[bytes, bytes, int]:
    blank = data.find(b" ", at, at + _INT64_DIGITS + 1)
    digits = data[at:blank] if blank >= 0 else b""
    if not digits.isdigit():
        raise RefusedError("pax: a record does not start with its length")
    end = at + int(digits)
    if end <= blank + 1 or end > len(data) or data[end - 1] != 0x0A:
        raise RefusedError("pax: a record's length lies")
    key, equals, value = data[blank + 1 : end - 1].partition(b"=")
    if not equals or not key or 0 in key:
        raise RefusedError("pax: a record has no key")
    if key in _TEXT_KEYS and 0 in value:
        raise RefusedError(f"pax: NUL in {key.decode()}")
    return key, value, end


def apply_records(header: Header, records: dict[bytes, bytes]) -> None:
    """Overlay an entry's fields; an empty value leaves the header's own."""
    for key, value in records.items():
        if not value:
            continue
        if key == b"path":
            header.name = value
        elif key == b"linkpath":
            header.link = value
        elif key == b"size":
            header.size = parse_int(value, "size")
        elif key == b"uid":
            header.uid = parse_int(value, "uid")
        elif key == b"gid":
            header.gid = parse_int(value, "gid")
        elif key == b"mtime":
            header.mtime_ns = parse_time_ns(value)


def parse_int(value: bytes, what: str) -> int:
    """A signed decimal of at most 64 bits; RefusedError names ``what``."""
    digits = value[1:] if value[:1] in (b"-", b"+") else value
    if digits.isdigit() and len(digits) <= 2 * _INT64_DIGITS:
        parsed = int(value)
        if -(1 << 63) <= parsed < 1 << 63:
            return parsed
    raise RefusedError(f"pax: {what} is no 64-bit number: {value[:60]!r}")


def parse_time_ns(value: bytes) -> int:
    """Decimal seconds with a fraction, perhaps before 1970, in nanoseconds (finer is cut off)."""
    whole, _, fraction = value.partition(b".")
    seconds = parse_int(whole, "mtime")
    if fraction and not fraction.isdigit():
        raise RefusedError(f"pax: mtime is no time: {value[:60]!r}")
    nanoseconds = int(fraction[:9].ljust(9, b"0")) if fraction else 0
    sign = -1 if whole[:1] == b"-" else 1
    return seconds * 1_000_000_000 + sign * nanoseconds
