"""Indexes that others made, put together: trust, lookups, and what is compared afterwards.

Lookups serve decisions, so they come first; a comparison takes things away, so it comes last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from snapshotter.clock import Clock
from snapshotter.config import Config
from snapshotter.content import Digest
from snapshotter.daemon.groundwork import Groundwork
from snapshotter.daemon.pushing import RegistryPublisher
from snapshotter.daemon.undo import Undo
from snapshotter.imagefs.arrivals import Arrivals
from snapshotter.imagefs.catalog import Catalog
from snapshotter.imagefs.comparison import Comparison, Means
from snapshotter.imagefs.decision import Decider
from snapshotter.imagefs.foreign import ForeignIndexes
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.lookup import Lookup
from snapshotter.imagefs.removal import Remover
from snapshotter.imagefs.sharing import Sharing
from snapshotter.imagefs.trust import Trust
from snapshotter.imagefs.verdicts import Verdicts
from snapshotter.imagefs.views import Views
from snapshotter.indexes.keys import TrustedKeys
from snapshotter.metrics import Metrics

Refused = Callable[[Digest, Digest, str], Awaitable[None]]


@dataclass(slots=True)
class Indexes:
    """What is made for other people's indexes; ``comparison`` follows once there is a remover."""

    trust: Trust
    verdicts: Verdicts
    arrivals: Arrivals
    lookup: Lookup | None
    foreign: ForeignIndexes


async def open_indexes(
    config: Config,
    ground: Groundwork,
    ingest: Ingest,
    mounts: LayerMounts,
    pool: ThreadPoolExecutor,
    metrics: Metrics,
    clock: Clock,
    undo: Undo,
) -> Indexes:
    """All of it; nothing is asked of anybody yet."""
    settings, shelf = config.index, ground.shelf
    trust = Trust(settings.trust, TrustedKeys(settings.trusted_keys))
    verdicts = Verdicts(ground.database)
    await verdicts.load()
    arrivals = Arrivals(shelf, trust, ground.registry, ingest.running, pool)
    lookup = None
    if settings.lookup:
        lookup = Lookup(
            ground.registry,
            arrivals,
            trust,
            verdicts.of_artifact,
            clock,
            budget_s=settings.lookup_budget,
            forget_s=settings.forget_misses,
            count=lambda outcome: metrics.index_lookups.labels(outcome).inc(),
        )
        undo.later(lookup.close)

    shared: list[Callable[[Digest], object]] = []

    def built(blob: Digest) -> None:
        foreign = not shelf.provenance(blob).own
        shelf.rebuilt(blob)
        if foreign:
            mounts.metadata.drop(blob.hex)
        for tell in shared:
            tell(blob)

    ingest.on_indexed = built
    if settings.push:
        publisher = RegistryPublisher(ground.registry, settings.sign_key, trust.keys, clock)
        sharing = Sharing(
            ground.catalog,
            shelf,
            ingest,
            verdicts,
            publisher,
            clock,
            lambda outcome: metrics.index_pushes.labels(outcome).inc(),
        )
        shared.append(sharing.built)
        sharing.start()
        undo.later(sharing.stop)
    foreign = ForeignIndexes(ground.catalog, shelf, trust, lookup)
    return Indexes(trust, verdicts, arrivals, lookup, foreign)


@dataclass(frozen=True, slots=True)
class Bench:
    """The parts that a comparison works with."""

    ground: Groundwork
    views: Views
    ingest: Ingest
    mounts: LayerMounts
    remover: Remover
    blame: Refused
    metrics: Metrics


def open_comparison(indexes: Indexes, bench: Bench, clock: Clock, undo: Undo) -> Comparison:
    """Compares in the background what nobody vouches for."""
    indexes.foreign.discards = bench.remover
    counter = bench.metrics.index_comparisons
    comparison = Comparison(
        Means(
            bench.ground.shelf,
            indexes.trust,
            bench.ground.catalog,
            bench.views,
            bench.ingest,
            bench.mounts,
            bench.remover,
            indexes.verdicts,
            bench.blame,
            lambda verdict: counter.labels(verdict).inc(),
            clock,
        )
    )
    bench.views.when_complete = comparison.wake
    indexes.arrivals.arrived = comparison.wake
    comparison.start()
    undo.later(comparison.stop)
    return comparison


async def refuse(
    catalog: Catalog, decider: Decider, clock: Clock, blob: Digest, view: Digest, reason: str
) -> None:
    """A layer is refused: what was decided on its images no longer holds."""
    await catalog.blame(blob, view, reason, clock.wall_ns())
    for image in catalog.images_of_blob(blob):
        decider.forget(image.manifest)
