"""What every compressed form of a layer offers: one pass from stored to plain bytes.

A PlainStream is pure: bytes in, bytes out, no I/O. It runs from the blob's first byte, or from a
restart point that an earlier pass recorded. It knows offsets, never digests or tar.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class PointKind(IntEnum):
    """What begins at a restart point."""

    MEMBER = 0
    """A gzip member, a zstd frame, or the blob itself: nothing before it is needed."""

    BLOCK = 1
    """A deflate block: the window, and the bits left over in the first byte, are needed."""


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """A place where decoding can begin.

    ``in_offset`` is the compressed offset of the first byte to be given, ``out_offset`` the plain
    offset of the first byte that comes out, ``bits`` the number of unread (high) bits in the
    first byte (0: all of it), ``window`` the plain bytes before ``out_offset`` (at most 32 KiB).
    """

    in_offset: int
    out_offset: int
    kind: PointKind = PointKind.MEMBER
    bits: int = 0
    window: bytes = b""


class PlainStream(Protocol):
    """One pass over a blob. After a RefusedError it must not be used any more."""

    in_offset: int
    """Compressed offset of the next byte that ``step`` wants."""

    out_offset: int
    """Plain offset of the next byte that comes out."""

    def step(self, data: memoryview, out: memoryview) -> tuple[int, int]:
        """Decode until ``data`` is consumed or ``out`` is full: (bytes consumed, bytes produced).

        Raises RefusedError naming the fault and its compressed offset.
        """
        ...

    def take_ends(self) -> list[int]:
        """The compressed offsets by which the chunks were complete that ended since last asked."""
        ...

    def take_points(self) -> list[RestartPoint]:
        """The restart points passed since last asked, the blob's first byte not among them."""
        ...

    def finish(self) -> None:
        """Raise RefusedError unless the blob may end at ``in_offset``."""
        ...

    def memory_bytes(self) -> int:
        """About how much memory this pass holds between two steps."""
        ...
