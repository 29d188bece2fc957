"""In which order tiers are asked.

Only failures lower a tier's rank, and only for a while; one that is busy or does not have a blob
has done nothing wrong. It asks nobody itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snapshotter.clock import Clock
from snapshotter.tiers.tier import Tier


@dataclass(slots=True)
class _Record:
    failures: int = 0
    failed_at_s: float = 0.0


class Ranking:
    """The tiers of a node in the order of preference that its configuration gave them."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock, *, forgive_s: float = 30.0) -> None:
        self._tiers = tuple(tiers)
        self._clock = clock
        self._forgive_s = forgive_s
        self._records = {id(tier): _Record() for tier in tiers}

    def order(self) -> list[Tier]:
        """All tiers, those that failed lately behind the others."""
        return sorted(self._tiers, key=self._demerits)

    def worked(self, tier: Tier) -> None:
        """``tier`` gave what was asked for."""
        self._records[id(tier)].failures = 0

    def failed(self, tier: Tier) -> None:
        """``tier`` neither gave what was asked for nor had a good reason."""
        record = self._records[id(tier)]
        record.failures += 1
        record.failed_at_s = self._clock.monotonic_s()

    def _demerits(self, tier: Tier) -> int:
        record = self._records[id(tier)]
        age_s = self._clock.monotonic_s() - record.failed_at_s
        return record.failures if age_s < self._forgive_s else 0
