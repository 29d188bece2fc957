"""What was fetched for one view, by which tier, and what went wrong: for `ember status`.

Every event is counted once, for the view and for the node. It decides nothing.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from prometheus_client import Counter

from snapshotter.metrics import Metrics


@dataclass(slots=True)
class Tally:
    """Counts of one view since the daemon opened it; bytes as the tiers store them."""

    asks: int = 0
    misses: int = 0
    joined_chunks: int = 0
    failed_asks: int = 0
    corrupt: int = 0
    bytes_by_tier: collections.Counter[str] = field(default_factory=collections.Counter)
    index_bytes: int = 0
    """Of the index's windows, which the others don't count."""
    chunks_by_tier: collections.Counter[str] = field(default_factory=collections.Counter)
    last_failure: str = ""
    trouble: str = ""
    """Why nothing comes: the last failure, if nothing came after it."""


class Ledger:
    """Writes both the view's tally and the daemon's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.tally = Tally()
        self._counters: dict[tuple[object, ...], Counter] = {}

    def asked(self, *, demand: bool, missing: int) -> None:
        """Somebody asked for an extent of which ``missing`` chunks are not here."""
        self.tally.asks += 1
        self.tally.misses += missing > 0
        self._of(self.metrics.asks, _purpose(demand), "miss" if missing else "hit").inc()

    def waited(self, duration_s: float, *, demand: bool) -> None:
        """A miss was answered after ``duration_s``."""
        if demand:
            self.metrics.wait_s.observe(duration_s)

    def gave_up(self, *, demand: bool) -> None:
        """A miss was not answered before its deadline."""
        self.tally.failed_asks += 1
        self.metrics.failed_asks.labels(_purpose(demand)).inc()

    def received(self, tier: str, length: int, *, demand: bool) -> None:
        """``length`` stored bytes came from ``tier``."""
        self.tally.bytes_by_tier[tier] += length
        self._of(self.metrics.tier_bytes, tier, _purpose(demand)).inc(length)

    def received_windows(self, tier: str, length: int) -> None:
        """``length`` bytes of an index's windows came from ``tier``."""
        self.tally.index_bytes += length
        self._of(self.metrics.tier_bytes, tier, "index").inc(length)

    def kept(self, tier: str, chunks: int, *, demand: bool) -> None:
        """``chunks`` from ``tier`` were right and are here now."""
        if chunks:
            self.tally.trouble = ""
            self.tally.chunks_by_tier[tier] += chunks
            self._of(self.metrics.tier_chunks, tier, _purpose(demand)).inc(chunks)

    def failed(self, tier: str, outcome: str, why: str) -> None:
        """A fetch from ``tier`` ended without all that was asked for."""
        self.tally.corrupt += outcome == "corrupt"
        self.tally.last_failure = self.tally.trouble = f"{tier}: {why}"
        self.metrics.tier_outcomes.labels(tier, outcome).inc()

    def _of(self, counter: Counter, *labels: str) -> Counter:
        """One of a counter's children; looking it up there takes locks."""
        key = (id(counter), *labels)
        found = self._counters.get(key)
        if found is None:
            found = self._counters[key] = counter.labels(*labels)
        return found


def _purpose(demand: bool) -> str:
    return "demand" if demand else "background"
