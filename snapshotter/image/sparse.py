"""Sparse entries: their maps in all four formats, and where each piece of the file will lie.

Pure. Formats: GNU tar's manual, "Storing Sparse Files" (old GNU, and PAX 0.0, 0.1, 1.0). EROFS
maps a file in equal chunks of 2^n blocks; a chunk is a hole, or lies whole in the view, or has to
be carried in the metadata image. ``plan`` picks the chunk that costs the fewest bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from snapshotter.errors import RefusedError
from snapshotter.image.pax import SPARSE_MAP, parse_int
from snapshotter.image.tar_header import number
from snapshotter.image.tree import BLOCK_BYTES, Segment

MAP_BYTES = 1 << 20
"""Longest map that is read, as for any other special record."""

_INDEX_BYTES = 8
_MAX_CHUNK_BITS = 31


class Data(NamedTuple):
    """One line of a sparse map: ``length`` bytes of data at ``offset`` of the file."""

    offset: int
    length: int


class Capture(NamedTuple):
    """Bytes of the view, from ``view_offset`` on, that go to ``at`` of an inline buffer."""

    view_offset: int
    length: int
    buffer: bytearray
    at: int

    def behind(self, length: int) -> Capture:
        """What is left of it behind its first ``length`` bytes."""
        return Capture(
            self.view_offset + length, self.length - length, self.buffer, self.at + length
        )


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """Segments in the view, and inline ones: (file offset, buffer) filled by the captures.

    ``cost_bytes`` is what the file takes in the metadata image.
    """

    segments: list[Segment]
    inline: list[tuple[int, bytearray]]
    captures: list[Capture]
    cost_bytes: int

    def settle(self) -> tuple[Segment, ...]:
        """All segments in order, once the captures are filled."""
        carried = [Segment(at, len(data), -1, bytes(data)) for at, data in self.inline]
        return tuple(sorted(self.segments + carried, key=lambda segment: segment.file_offset))


def is_pax_sparse(records: dict[bytes, bytes]) -> bool:
    """Whether the records make the entry a sparse one of a known version."""
    version = records.get(b"GNU.sparse.major", b""), records.get(b"GNU.sparse.minor", b"")
    if version == (b"", b""):
        return bool(records.get(SPARSE_MAP))
    return version in ((b"0", b"0"), (b"0", b"1"), (b"1", b"0"))


def has_map_in_data(records: dict[bytes, bytes]) -> bool:
    """Whether the map opens the entry's data (format 1.0)."""
    return records.get(b"GNU.sparse.major") == b"1"


def pax_name(records: dict[bytes, bytes]) -> bytes | None:
    """The real name of a sparse entry, if the records have it."""
    return records.get(b"GNU.sparse.name") or None


def pax_size(records: dict[bytes, bytes]) -> int | None:
    """The real size of a sparse file, if the records have it."""
    size = records.get(b"GNU.sparse.size") or records.get(b"GNU.sparse.realsize")
    return parse_int(size, "sparse size") if size else None


def map_of_records(records: dict[bytes, bytes]) -> list[Data]:
    """The map of format 0.0 or 0.1."""
    count = parse_int(records.get(b"GNU.sparse.numblocks", b""), "sparse block count")
    text = records.get(SPARSE_MAP, b"")
    numbers = text.split(b",") if text else []
    if len(numbers) != 2 * count:
        raise RefusedError("sparse map: its length is not what its count says")
    return _pairs([parse_int(item, "sparse map") for item in numbers])


def map_lines_wanted(data: bytes | bytearray) -> int:
    """How many lines a map of format 1.0 has in all; ``data`` holds at least the first."""
    count = parse_int(bytes(data[: data.index(b"\n")]), "sparse block count")
    if not 0 <= count <= MAP_BYTES:
        raise RefusedError(f"sparse map: {count} blocks")
    return 1 + 2 * count


def map_of_lines(data: bytes, wanted: int) -> list[Data]:
    """The map of format 1.0, from blocks that hold all its lines."""
    lines = data.split(b"\n", wanted)[1:wanted]
    return _pairs([parse_int(line, "sparse map") for line in lines])


def map_of_block(fields: bytes, entries: int) -> list[Data]:
    """The entries of an old GNU header (4, at byte 386) or extension block (21, at byte 0)."""
    found = []
    for at in range(0, 24 * entries, 24):
        if fields[at] == 0:
            break
        found.append(Data(number(fields[at : at + 12]), number(fields[at + 12 : at + 24])))
    return found


def _pairs(numbers: list[int]) -> list[Data]:
    return [Data(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def check_map(data: list[Data], size: int, stored: int) -> None:
    """Refuse maps that overlap, leave the file, or don't use up the ``stored`` bytes."""
    end = total = 0
    for offset, length in data:
        if length < 0 or offset < end or offset + length > size:
            raise RefusedError("sparse map: pieces overlap, are out of order or leave the file")
        end = offset + length
        total += length
    if total != stored:
        raise RefusedError(f"sparse map: {total} bytes mapped, {stored} stored")


def plan(data: list[Data], size: int, view_offset: int, *, inline_limit: int) -> SparsePlan:
    """Where each piece of a sparse file lies; its stored data start at ``view_offset``.

    RefusedError if more than ``inline_limit`` bytes would have to be carried in the metadata.
    """
    pieces = _merge(data, view_offset)
    whole_file_bits = max(0, (size - 1).bit_length() - 9) if size else 0
    best = BLOCK_BYTES
    cost = -1
    for bits in range(min(whole_file_bits, _MAX_CHUNK_BITS) + 1):
        chunk = BLOCK_BYTES << bits
        mixed = sum(end - start for start, end in _mixed(pieces, size, chunk))
        price = _INDEX_BYTES * -(-size // chunk) + chunk * mixed
        if cost < 0 or price < cost:
            best, cost = chunk, price
    if cost > inline_limit:
        raise RefusedError(f"sparse file: it alone takes {cost} bytes of metadata")
    return _lay_out(pieces, size, best, cost)


class _Piece(NamedTuple):
    start: int
    end: int
    view_offset: int


def _merge(data: list[Data], view_offset: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for offset, length in data:
        if length:
            if pieces and pieces[-1].end == offset:
                pieces[-1] = pieces[-1]._replace(end=offset + length)
            else:
                pieces.append(_Piece(offset, offset + length, view_offset))
            view_offset += length
    return pieces


def _whole(piece: _Piece, size: int, chunk: int) -> tuple[int, int]:
    """The chunks [first, last) that lie in the view as they are."""
    if (piece.view_offset - piece.start) % BLOCK_BYTES:
        return 0, 0
    first, last = -(-piece.start // chunk), piece.end // chunk
    if piece.end == size and size % BLOCK_BYTES == 0:
        last = -(-size // chunk)
    return (first, last) if first < last else (0, 0)


def _carried(piece: _Piece, size: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """The chunks [first, last) that the piece touches and that don't lie in the view whole."""
    first, last = _whole(piece, size, chunk)
    touched = piece.start // chunk, (piece.end - 1) // chunk + 1
    if first == last:
        return (touched,)
    return (touched[0], first), (last, touched[1])


def _mixed(pieces: list[_Piece], size: int, chunk: int) -> list[tuple[int, int]]:
    """The runs of chunks that must be carried, in order, none touching the next."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        for start, end in _carried(piece, size, chunk):
            if start >= end:
                continue
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            else:
                runs.append((start, end))
    return runs


def _lay_out(pieces: list[_Piece], size: int, chunk: int, cost_bytes: int) -> SparsePlan:
    runs = [
        (first * chunk, bytearray(min(last * chunk, size) - first * chunk))
        for first, last in _mixed(pieces, size, chunk)
    ]
    segments: list[Segment] = []
    captures: list[Capture] = []
    run = 0
    for piece in pieces:
        first, last = _whole(piece, size, chunk)
        if first < last:
            start, end = first * chunk, min(last * chunk, size)
            segments.append(Segment(start, end - start, piece.view_offset + start - piece.start))
        for first, last in _carried(piece, size, chunk):
            start, end = max(piece.start, first * chunk), min(piece.end, last * chunk)
            if start >= end:
                continue
            while runs[run][0] + len(runs[run][1]) < end:
                run += 1
            at, buffer = runs[run]
            view_offset = piece.view_offset + start - piece.start
            captures.append(Capture(view_offset, end - start, buffer, start - at))
    return SparsePlan(segments, runs, captures, cost_bytes)
