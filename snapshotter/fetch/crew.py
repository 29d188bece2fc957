"""What all fetches of a node share: tiers, slots, threads, decoders, time."""

from __future__ import annotations

import random
from concurrent.futures import Executor
from dataclasses import dataclass, field

from snapshotter.clock import Clock
from snapshotter.fetch.limits import RoadLimits
from snapshotter.fetch.link import Link
from snapshotter.fetch.pace import Origins
from snapshotter.fetch.slots import Slots
from snapshotter.fetch.sources import Sources
from snapshotter.fetch.windows import Windows
from snapshotter.image.decode import DecoderPool
from snapshotter.tiers.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Crew:
    """``demand_pool`` and ``background_pool`` inflate and hash, so neither waits for the other."""

    sources: Sources
    ranking: Ranking
    slots: Slots
    origins: Origins
    link: Link
    decoders: DecoderPool
    windows: Windows
    demand_pool: Executor
    background_pool: Executor
    clock: Clock
    limits: RoadLimits
    chance: random.Random = field(default_factory=random.Random)

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that are rather fetched than asking twice: a part of those that could
        have come meanwhile, since two requests may be under way at once."""
        limits = self.limits
        return max(limits.gap_bytes, min(limits.gap_most_bytes, self.link.request_bytes // 4))
