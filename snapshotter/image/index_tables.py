"""What must hold of an index's tables before anybody follows them. Pure, and quick for any length.

Whoever asks for a chunk trusts what is checked here: ranges lie inside the blob, checkpoints come
before what they give, windows lie inside the windows file, in order, and none over another.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Callable
from itertools import islice

from snapshotter.content import Compression
from snapshotter.errors import RefusedError
from snapshotter.image import index_layout as layout
from snapshotter.image.stream import PointKind

WINDOW_BYTES = 32 * 1024
STORED_BYTES = WINDOW_BYTES + 1024
"""No window is stored in more: what does not compress grows by a few bytes."""

_BLOCK = int(PointKind.BLOCK)
_MEMBER = int(PointKind.MEMBER)
_KINDS = frozenset(int(kind) for kind in PointKind)

Row = tuple[int, int, int, int, int, int, int, bytes]
"""A checkpoint as layout.CHECKPOINT unpacks it."""


def check_tables(
    data: memoryview, header: layout.Header, refuse: Callable[[str], RefusedError]
) -> None:
    """Raise ``refuse(fault)`` at the first thing that is wrong with the tables of ``data``."""
    if any(data[header.tables_end : header.erofs_offset]):
        raise refuse("there is something between its tables and its image")
    ends = chunk_ends(data, header)
    if not all(map(operator.le, ends, islice(ends, 1, None))):
        raise refuse("the chunk table goes backwards")
    if ends and not 0 < ends[0] <= ends[-1] <= header.blob_bytes:
        raise refuse("the chunk table leaves the blob")
    if header.compression is Compression.PLAIN:
        _check_plain(header, ends, refuse)
    else:
        _check_checkpoints(data, header, ends, refuse)


def chunk_ends(data: memoryview, header: layout.Header) -> array[int]:
    """The compressed offset by which each chunk's last byte comes out."""
    ends = array("Q", bytes(data[header.ends_offset : header.checkpoints_offset]))
    if sys.byteorder == "big":
        ends.byteswap()
    return ends


def _check_plain(
    header: layout.Header, ends: array[int], refuse: Callable[[str], RefusedError]
) -> None:
    size, length = header.chunk_bytes, header.view_bytes
    wanted = array("Q", (min(at + size, length) for at in range(0, length, size)))
    if header.checkpoint_count or header.blob_bytes != length or ends != wanted:
        raise refuse("a plain layer's tables are not the identity")


def _check_checkpoints(
    data: memoryview,
    header: layout.Header,
    ends: array[int],
    refuse: Callable[[str], RefusedError],
) -> None:
    rows = layout.CHECKPOINT.iter_unpack(data[header.checkpoints_offset : header.tables_end])
    before: Row | None = None
    windows_end = longest = 0
    for number, row in enumerate(rows):
        fault = _fault(row, before, windows_end, header, ends)
        if fault:
            raise refuse(f"checkpoint {number} {fault}")
        if row[3]:
            windows_end = row[2] + row[3]
        longest = max(longest, row[1] - before[1] if before else 0)
        before = row
    if before is None:
        raise refuse("a compressed layer without a checkpoint")
    if header.longest_run_bytes != max(longest, header.view_bytes - before[1]):
        raise refuse("its checkpoints do not lie as far apart as it says")


def _fault(
    row: Row, before: Row | None, windows_end: int, header: layout.Header, ends: array[int]
) -> str:
    in_offset, out_offset, window_offset, stored, window, bits, kind, _ = row
    if kind not in _KINDS:
        return "is of an unknown kind"
    if before is None and (in_offset, out_offset, kind) != (0, 0, _MEMBER):
        return "is not the blob's first byte"
    if before is not None and (
        in_offset <= before[0] or out_offset <= before[1] or out_offset >= header.view_bytes
    ):
        return "is out of order"
    chunk = -(-out_offset // header.chunk_bytes)
    if (chunk < len(ends) and ends[chunk] <= in_offset) or in_offset > header.blob_bytes:
        return "lies behind the bytes that it should give"
    if window_offset + stored > header.windows_bytes or window > WINDOW_BYTES:
        return "has a window outside the windows file"
    if bool(window) != bool(stored) or bits > 7 or stored > STORED_BYTES:
        return "contradicts itself"
    if kind != _BLOCK:
        return "has a window where none is needed" if window or bits else ""
    if header.compression is not Compression.GZIP:
        return "is a deflate block in a layer that is not gzip"
    if stored and window_offset < windows_end:
        return "has a window that lies over another"
    return ""
