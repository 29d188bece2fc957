"""When a read of an origin counts as slow, and how many may be asked a second time.

Slow is what takes longer than 95 of 100 reads took lately. A second ask costs a token: every read
brings a twentieth of one, a few are in store, and few are out at a time, so an origin that is dead
or overloaded gets hardly more requests than without.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """Bounds of hedging; times in seconds.

    Before ``least_samples`` reads nothing is known, and ``unknown_s`` counts. Pieces of a body
    that is on its way get ``piece_factor`` times what they take, and no less than
    ``piece_floor_s``: it is late, not lost.
    """

    floor_s: float = 0.05
    ceiling_s: float = 2.0
    unknown_s: float = 1.0
    least_samples: int = 8
    piece_floor_s: float = 0.25
    piece_factor: float = 4.0
    share: float = 0.05
    burst: float = 32.0
    at_once: int = 8
    lost_in_a_row: int = 3


_SAMPLES = 64
_ORIGINS = 256


class Quantile:
    """The 95th percentile of the last samples."""

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """One more; the oldest goes."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > _SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def value(self, least_samples: int) -> float | None:
        """None while there are too few."""
        count = len(self._sorted)
        return self._sorted[count * 95 // 100] if count >= least_samples else None


class Latency:
    """What one origin's reads took lately, and how many second asks it may get."""

    def __init__(self, limits: HedgeLimits) -> None:
        self._limits = limits
        self._first = Quantile()
        self._piece = Quantile()
        self._tokens = limits.burst
        self.hedges = 0
        """Second asks that are out."""
        self._era = 0
        self._lost = 0
        self.soon_s = limits.floor_s
        """When to look again whether one more is allowed."""

    def began(self) -> int:
        """A read was asked for; the era that it belongs to."""
        self._tokens = min(self._limits.burst, self._tokens + self._limits.share)
        return self._era

    def won(self, era: int) -> None:
        """The place that was asked first gave the first bytes."""
        if era == self._era:
            self._lost = 0

    def lost(self, era: int) -> bool:
        """It had sent nothing when the second place did. True: several times in a row; then
        another era begins, for others should be asked first now."""
        self._lost += era == self._era
        if self._lost < self._limits.lost_in_a_row:
            return False
        self._era, self._lost = self._era + 1, 0
        return True

    def may_hedge(self) -> bool:
        """Whether one more second ask is allowed now; if so it counts, until `hedge_over`."""
        if self._tokens < 1 or self.hedges >= self._limits.at_once:
            return False
        self._tokens -= 1
        self.hedges += 1
        return True

    def hedge_over(self) -> None:
        """A second ask has ended, or is the only one that is left."""
        self.hedges -= 1

    def took(self, seconds: float, *, first: bool) -> None:
        """The first bytes of a read, or more of them, came after so long."""
        (self._first if first else self._piece).add(seconds)

    def slow_s(self, *, first: bool) -> float:
        """After how long without the first bytes, or without more, a read is slow."""
        limits = self._limits
        begins_s = self._first.value(limits.least_samples)
        if begins_s is None:
            return limits.unknown_s
        slow_s = max(limits.floor_s, begins_s)
        if not first:
            piece_s = self._piece.value(limits.least_samples) or 0.0
            slow_s = max(slow_s, limits.piece_floor_s, piece_s * limits.piece_factor)
        return min(limits.ceiling_s, slow_s)


class Latencies:
    """Of every origin (registry) that was read from lately."""

    def __init__(self, limits: HedgeLimits) -> None:
        self._limits = limits
        self._known: OrderedDict[str, Latency] = OrderedDict()

    def of(self, repository: str) -> Latency:
        """Of the registry that ``repository`` (``host[:port]/path``) lies in."""
        name = repository.partition("/")[0]
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = Latency(self._limits)
            if len(self._known) > _ORIGINS:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return known
