"""Inflating gzip in C, without the GIL, with restart points and chunk ends on the way.

An Inflater is one pass over a gzip file, from its first byte or from a restart point. It holds no
more than zlib's state; buffers are the caller's. It knows nothing of layers, and is used by one
thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ioengine._native import ffi, lib
from ioengine.errors import check

WINDOW_BYTES = 32 * 1024
"""The farthest that deflate reaches back (RFC 1951, section 2)."""

LOOKAHEAD_BYTES = 8
"""So many bytes behind the last that is needed let every decoder give all that is complete."""

_BAD_MESSAGE = 74  # EBADMSG
_NEEDS_INPUT, _NEEDS_ROOM, _AT_POINT = 0, 1, 2
_ENDS_ROOM = 256


def has_isal() -> bool:
    """Whether this build decodes with ISA-L; without it, every read of a gzip chunk is slower."""
    return bool(lib.ember_inflate_has_isal())


class InflateError(Exception):
    """The bytes are not a gzip file; the message is zlib's word for what is wrong."""


@dataclass(frozen=True, slots=True)
class InflatePoint:
    """Where inflating can begin again.

    ``in_offset``: compressed offset of the first byte to be given. ``out_offset``: plain offset of
    the first byte that comes out. ``bits``: how many (high) bits of the first byte are unread, 0
    for all. ``window``: the plain bytes before ``out_offset``, at most 32 KiB. ``member``: a gzip
    header begins here; otherwise the point is between two deflate blocks.
    """

    in_offset: int
    out_offset: int
    bits: int
    window: bytes
    member: bool


def trimmed(point: InflatePoint, behind: bytes, *, is_all: bool) -> InflatePoint:
    """``point`` with zeros where nothing that comes after it reaches into its window.

    ``behind``: the stored bytes from ``point.in_offset`` on, so many that 32 KiB come out, or all
    there are (``is_all``); with fewer, or wrong ones, the window stays as it is.
    """
    window = bytearray(point.window)
    result = lib.ember_inflate_trim(
        _native(point), ffi.from_buffer(window), ffi.from_buffer(behind), len(behind), is_all
    )
    check(result, "trimming a window")
    return replace(point, window=bytes(window))


def _native(at: InflatePoint) -> Any:
    point = ffi.new("ember_inflate_point *")
    point.in_offset, point.out_offset = at.in_offset, at.out_offset
    point.bits, point.window_bytes = at.bits, len(at.window)
    point.member = int(at.member)
    return point


class Inflater:
    """One pass over a gzip file of any number of members."""

    def __init__(
        self,
        *,
        spacing_bytes: int = 0,
        chunk_bytes: int = 0,
        at: InflatePoint | None = None,
        with_isal: bool = True,
    ) -> None:
        """Begin at the first byte, or at the restart point ``at``.

        A restart point is recorded at the first block that begins ``spacing_bytes`` plain bytes
        or more behind the last one (0: none); a chunk end for every ``chunk_bytes`` plain bytes
        (0: none). ISA-L decodes, where it was there at build time and ``with_isal`` allows: twice
        as fast as zlib. It wants up to LOOKAHEAD_BYTES more than the plain bytes need, notes chunk
        ends some 100 bytes late, and may pass over a place between two blocks.
        """
        holder = ffi.new("ember_inflate **")
        if at is None:
            result = lib.ember_inflate_open(holder, spacing_bytes, chunk_bytes, with_isal)
        else:
            window = ffi.from_buffer(at.window)
            result = lib.ember_inflate_resume(holder, _native(at), window, with_isal)
        check(result, "starting to inflate")
        self._self = ffi.gc(holder[0], lib.ember_inflate_close)
        self._io = ffi.new("ember_inflate_io *")
        self._ends = ffi.new("uint64_t[]", _ENDS_ROOM)
        self._io.ends, self._io.ends_room = self._ends, _ENDS_ROOM
        self.in_offset = 0 if at is None else at.in_offset
        self.out_offset = 0 if at is None else at.out_offset
        self.ends: list[int] = []
        self.points: list[InflatePoint] = []

    def step(self, data: memoryview, out: memoryview) -> tuple[int, int]:
        """Inflate until ``data`` is consumed or ``out`` is full: (bytes consumed, bytes produced).

        Chunk ends and restart points met on the way are appended to ``ends`` and ``points``.
        Raises InflateError, after which nothing more comes out.
        """
        io = self._io
        source, target = ffi.from_buffer(data), ffi.from_buffer(out, require_writable=True)
        consumed = produced = 0
        while True:
            io.in_bytes, io.out_bytes = len(data) - consumed, len(out) - produced
            io.output = ffi.cast("uint8_t *", target) + produced
            io.input = ffi.cast("uint8_t *", source) + consumed
            result = lib.ember_inflate_step(self._self, io)
            consumed += io.consumed
            produced += io.produced
            self.in_offset += io.consumed
            self.out_offset += io.produced
            self.ends.extend(self._ends[0 : io.ends_count])
            if result == _AT_POINT:
                self.points.append(self._take())
            elif result == -_BAD_MESSAGE:
                fault = ffi.string(lib.ember_inflate_fault(self._self)).decode()
                raise InflateError(fault)
            elif check(result, "inflating") == _NEEDS_INPUT or produced == len(out):
                return consumed, produced

    def at_end(self) -> bool:
        """Whether a gzip file may end here: behind a member, or in the zeros after the last."""
        return bool(lib.ember_inflate_at_end(self._self))

    def _take(self) -> InflatePoint:
        point = ffi.new("ember_inflate_point *")
        window = bytearray(WINDOW_BYTES)
        check(
            lib.ember_inflate_take(self._self, point, ffi.from_buffer(window)),
            "reading a restart point",
        )
        return InflatePoint(
            point.in_offset,
            point.out_offset,
            point.bits,
            bytes(window[: point.window_bytes]),
            bool(point.member),
        )
