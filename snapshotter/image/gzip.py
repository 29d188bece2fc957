"""The stream of a gzip layer: all members, each verified, restart points in between.

Go's gzip reader, which containerd unpacks with, refuses what follows the last member unless it is
another member. So does this one, but for zeros (tape padding), which every gzip tool ignores.
"""

from __future__ import annotations

from dataclasses import replace

from ioengine import inflate
from ioengine.inflate import InflateError, InflatePoint, Inflater
from snapshotter.errors import RefusedError
from snapshotter.image.stream import PointKind, RestartPoint

_STATE_BYTES = 192 * 1024
"""zlib's state (32 KiB of window, tables, itself), ISA-L's (about 90 KiB), a window to begin."""


def trimmed(point: RestartPoint, behind: bytes, *, is_all: bool) -> RestartPoint:
    """``point`` with zeros where nothing behind it reaches into its window: a tenth is left.

    ``behind``: the stored bytes from its ``in_offset`` on, about as many as give 32 KiB; all of
    them up to the blob's end if ``is_all``.
    """
    if not point.window:
        return point
    inside = InflatePoint(point.in_offset, point.out_offset, point.bits, point.window, member=False)
    return replace(point, window=inflate.trimmed(inside, behind, is_all=is_all).window)


class GzipStream:
    """A PlainStream over zlib; CRC and length are checked of members read from their header."""

    def __init__(
        self, *, spacing_bytes: int = 0, chunk_bytes: int = 0, at: RestartPoint | None = None
    ) -> None:
        point = None
        if at is not None:
            member = at.kind is PointKind.MEMBER
            point = InflatePoint(at.in_offset, at.out_offset, at.bits, at.window, member)
        self._inflater = Inflater(spacing_bytes=spacing_bytes, chunk_bytes=chunk_bytes, at=point)
        self.in_offset = self._inflater.in_offset
        self.out_offset = self._inflater.out_offset

    def step(self, data: memoryview, out: memoryview) -> tuple[int, int]:
        inflater = self._inflater
        try:
            consumed, produced = inflater.step(data, out)
        except InflateError as error:
            raise RefusedError(
                f"gzip stream, compressed byte {inflater.in_offset}: {error}"
            ) from None
        self.in_offset, self.out_offset = inflater.in_offset, inflater.out_offset
        return consumed, produced

    def take_ends(self) -> list[int]:
        ends, self._inflater.ends = self._inflater.ends, []
        return ends

    def take_points(self) -> list[RestartPoint]:
        points, self._inflater.points = self._inflater.points, []
        return [
            RestartPoint(
                point.in_offset,
                point.out_offset,
                PointKind.MEMBER if point.member else PointKind.BLOCK,
                point.bits,
                point.window,
            )
            for point in points
        ]

    def finish(self) -> None:
        if not self._inflater.at_end():
            raise RefusedError(
                f"gzip stream is cut: it ends at compressed byte {self.in_offset}, inside a "
                "member or its trailer"
            )

    def memory_bytes(self) -> int:
        return _STATE_BYTES
