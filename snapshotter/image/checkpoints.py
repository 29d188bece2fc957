"""Restart points of one pass, on their way to the windows file: each waits for what follows it.

What of a point's window is needed shows in the next 32 KiB of plain bytes, so the stored bytes that
give them are kept that long. Points go on in the order in which they came. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ioengine.inflate import WINDOW_BYTES
from snapshotter.image.stream import RestartPoint

MOST_KEPT_BYTES = 512 * 1024
"""Stored bytes that one point is given: any real stream makes 32 KiB of a tenth of that."""
_BEFORE_BYTES = 64
"""A decoder reads ahead: a point may lie a little before the piece that it was found in."""


class Passed(NamedTuple):
    """A point that goes on, and the stored bytes from its place on; ``is_all``: all there are."""

    point: RestartPoint
    behind: bytes
    is_all: bool


class Checkpoints:
    """The points that wait. ``fed`` after each piece, ``end`` after the last; each gives those that
    wait no more, in order."""

    def __init__(self) -> None:
        self._waiting: deque[RestartPoint] = deque()
        self._kept = bytearray()
        self._kept_from = 0

    def add(self, point: RestartPoint) -> None:
        """A point that was found in the piece that is being decoded."""
        self._waiting.append(point)

    def fed(self, data: memoryview, out_offset: int) -> list[Passed]:
        """All of ``data``, the piece behind the last one, was decoded up to ``out_offset``."""
        self._kept += data
        passed = []
        while self._waiting and self._may_go(self._waiting[0], out_offset):
            passed.append(self._pass(self._waiting.popleft(), is_all=False))
        end = self._kept_from + len(self._kept)
        wanted = self._waiting[0].in_offset if self._waiting else end - _BEFORE_BYTES
        if wanted > self._kept_from:
            del self._kept[: wanted - self._kept_from]
            self._kept_from = wanted
        return passed

    def end(self) -> list[Passed]:
        """Nothing more comes."""
        passed = [self._pass(point, is_all=True) for point in self._waiting]
        self._waiting.clear()
        return passed

    def _may_go(self, point: RestartPoint, out_offset: int) -> bool:
        if not point.window or out_offset - point.out_offset >= WINDOW_BYTES:
            return True
        return self._kept_from + len(self._kept) - point.in_offset > MOST_KEPT_BYTES

    def _pass(self, point: RestartPoint, *, is_all: bool) -> Passed:
        behind = b""
        if point.window and point.in_offset >= self._kept_from:
            behind = bytes(self._kept[point.in_offset - self._kept_from :])
        return Passed(point, behind, is_all)
