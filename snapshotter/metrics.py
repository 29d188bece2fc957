"""What the daemon counts, for Prometheus: one object, made once and handed down.

Labels are bounded (tiers, reasons): a view or an image is never a label, `ember status` has those.
It does not know who reads it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_WAITS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)


class Metrics:
    """Counters of the road and the store; safe to use from threads."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.tier_bytes = Counter(
            "ember_tier_bytes",
            "Bytes that came from a tier, as it stores them: on demand, in the background, with the"
            " first pull of a layer, or of an index",
            ["tier", "purpose"],
            registry=self.registry,
        )
        self.tier_chunks = Counter(
            "ember_tier_chunks",
            "Chunks that came from a tier, were right and were written",
            ["tier", "purpose"],
            registry=self.registry,
        )
        self.tier_outcomes = Counter(
            "ember_tier_failures",
            "Fetches that ended without what was asked for: busy, miss, corrupt or failure",
            ["tier", "outcome"],
            registry=self.registry,
        )
        self.asks = Counter(
            "ember_asks",
            "Extents that were asked for: here already, or a miss",
            ["purpose", "result"],
            registry=self.registry,
        )
        self.wait_s = Histogram(
            "ember_miss_wait_seconds",
            "How long a reader waited for an extent that was not here",
            registry=self.registry,
            buckets=_WAITS_S,
        )
        self.failed_asks = Counter(
            "ember_failed_asks",
            "Extents that could not be had before their deadline",
            ["purpose"],
            registry=self.registry,
        )
        self.hedged_reads = Counter(
            "ember_hedged_reads",
            "Ranged reads that were slow and were asked for a second time",
            registry=self.registry,
        )
        self.jobs = Gauge(
            "ember_jobs",
            "Fetches of the road that run or are queued for a slot just now",
            ["state"],
            registry=self.registry,
        )
        self._count_indexes()

        self.reads_waiting = Gauge(
            "ember_reads_waiting", "Reads that wait in the kernel just now", registry=self.registry
        )
        self.longest_wait_s = Gauge(
            "ember_longest_wait_seconds",
            "How long the oldest of the reads that wait just now has waited",
            registry=self.registry,
        )

    def _count_indexes(self) -> None:
        self.index_lookups = Counter(
            "ember_index_lookups",
            "Lookups of indexes that others made: found, partly, absent, refused, failed, slow or"
            " busy",
            ["outcome"],
            registry=self.registry,
        )
        self.index_comparisons = Counter(
            "ember_index_comparisons",
            "Unsigned indexes that were compared with their complete layer: right or wrong",
            ["verdict"],
            registry=self.registry,
        )
        self.index_pushes = Counter(
            "ember_index_pushes",
            "Images whose indexes were to be pushed: pushed, there (already), refused or failed",
            ["outcome"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
