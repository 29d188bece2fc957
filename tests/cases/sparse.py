"""Sparse files as tars write them: in three versions of pax records, and the old way."""

from __future__ import annotations

from tests.cases.tars import (
    GNU_MAGIC,
    header,
    octal,
    padded,
    pax,
)


def sparse_old(name: bytes, pieces: list[tuple[int, bytes]], size: int) -> bytes:
    """An entry in old GNU's sparse form, with as many extension blocks as it takes."""
    fields = [octal(offset, 12) + octal(len(data), 12) for offset, data in pieces]
    rest = bytes(41) + b"".join(fields[:4]).ljust(96, b"\0")
    rest += (b"\1" if len(fields) > 4 else b"\0") + octal(size, 12)
    more = []
    for at in range(4, len(fields), 21):
        flag = b"\1" if at + 21 < len(fields) else b"\0"
        more.append((b"".join(fields[at : at + 21]).ljust(504, b"\0") + flag).ljust(512, b"\0"))
    data = b"".join(data for _, data in pieces)
    head = header(name, type=b"S", size=len(data), magic=GNU_MAGIC, rest=rest)
    return head + b"".join(more) + padded(data)


def sparse_pax(version: str, name: bytes, pieces: list[tuple[int, bytes]], size: int) -> bytes:
    """An entry in GNU's PAX sparse form 0.0, 0.1 or 1.0."""
    data = b"".join(data for _, data in pieces)
    pairs = [(offset, len(piece)) for offset, piece in pieces]
    if version == "1.0":
        numbers = [len(pairs), *(number for pair in pairs for number in pair)]
        stored = padded(b"".join(b"%d\n" % number for number in numbers)) + data
        records: list[tuple[str | bytes, str | bytes]] = [
            ("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", name), ("GNU.sparse.realsize", str(size)),
        ]  # fmt: skip
        return pax(records) + header(b"GNUSparseFile.0/x", size=len(stored)) + padded(stored)
    records = [
        ("GNU.sparse.major", "0"), ("GNU.sparse.minor", version[-1]),
        ("GNU.sparse.size", str(size)), ("GNU.sparse.numblocks", str(len(pairs))),
    ]  # fmt: skip
    if version == "0.1":
        text = ",".join(f"{offset},{length}" for offset, length in pairs)
        records += [("GNU.sparse.map", text), ("GNU.sparse.name", name)]
        return pax(records) + header(b"other", size=len(data)) + padded(data)
    for offset, length in pairs:
        records += [("GNU.sparse.offset", str(offset)), ("GNU.sparse.numbytes", str(length))]
    return pax(records) + header(name, size=len(data)) + padded(data)


def filled(pieces: list[tuple[int, bytes]], size: int) -> bytes:
    """What a sparse file reads as."""
    whole = bytearray(size)
    for offset, data in pieces:
        whole[offset : offset + len(data)] = data
    return bytes(whole)


SPARSE_SHAPES: dict[str, tuple[list[tuple[int, bytes]], int]] = {
    "aligned": ([(0, b"a" * 4096), (65536, b"b" * 8192)], 200_000),
    "tail": ([(4096, b"a" * 512), (99_328, b"z" * 700)], 100_028),
    "odd": ([(1, b"x"), (777, b"y" * 1000), (5000, b"w" * 3)], 6000),
    "shifted": ([(0, b"s" * 100), (1 << 20, b"t" * 70_000)], 2 << 20),
    "all-hole": ([], 3 << 20),
    "hole-at-end": ([(0, b"q" * 512), (1_000_000, b"")], 1_000_000),
    "no-hole": ([(0, b"n" * 3000)], 3000),
    "empty": ([], 0),
    "many": ([(n * 8192, bytes([n + 1]) * 4096) for n in range(60)], 60 * 8192),
}
