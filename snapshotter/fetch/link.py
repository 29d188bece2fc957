"""What a request costs in bytes: how many could have come in the time that it takes to begin.

Measured on all ranged fetches of this node, each origin's weight being what is fetched from it.
It decides nothing: gaps between ranges and what is read ahead follow from it.
"""

from __future__ import annotations

from snapshotter.clock import Clock

_WEIGHT = 0.1
_LEAST_BYTES = 16 * 1024
"""Shorter pieces say nothing of the rate."""


class Link:
    """Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begins_s: float | None = None
        self._rate: float | None = None

    @property
    def request_bytes(self) -> int:
        """Bytes that come in the time of one request's beginning; 0 while nothing is known."""
        if self._begins_s is None or self._rate is None:
            return 0
        return int(self._begins_s * self._rate)

    def measure(self) -> Measure:
        """For one fetch, made as it is asked for."""
        return Measure(self, self._clock)

    def began(self, seconds: float) -> None:
        """The first bytes came after so long."""
        self._begins_s = _blend(self._begins_s, seconds)

    def came(self, length_bytes: int, seconds: float) -> None:
        """So many bytes came in so long, once they had begun to."""
        if length_bytes >= _LEAST_BYTES and seconds > 0:
            self._rate = _blend(self._rate, length_bytes / seconds)


class Measure:
    """One fetch: ``piece`` for each piece that comes, ``end`` after the last."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._asked_s = clock.monotonic_s()
        self._began_s: float | None = None
        self._last_s = 0.0
        self._bytes = 0

    def piece(self, length_bytes: int) -> None:
        """It came now."""
        self._last_s = self._clock.monotonic_s()
        if self._began_s is None:
            self._began_s = self._last_s
            self._link.began(self._began_s - self._asked_s)
        else:
            self._bytes += length_bytes

    def end(self) -> None:
        """Nothing more comes."""
        if self._began_s is not None:
            self._link.came(self._bytes, self._last_s - self._began_s)


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
