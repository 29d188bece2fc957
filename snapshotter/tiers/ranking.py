"""In which order tiers are asked, and which are left in peace for now.

Only failures lower a tier's rank, and only for a while; a busy tier rests as long as it asked for,
and one that does not have a blob has done nothing wrong. It asks nobody itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snapshotter.clock import Clock
from snapshotter.content import BlobRef
from snapshotter.tiers.tier import Tier

_MOST_RESTS = 4096


@dataclass(slots=True)
class _Record:
    failures: int = 0
    failed_at_s: float = 0.0


class Ranking:
    """The tiers of a node in the order of preference that its configuration gave them."""

    def __init__(
        self, tiers: Sequence[Tier], clock: Clock, *, forgive_s: float = 30.0, busy_s: float = 1.0
    ) -> None:
        self._tiers = tuple(tiers)
        self._clock = clock
        self._forgive_s = forgive_s
        self._busy_s = busy_s
        self._records = {id(tier): _Record() for tier in tiers}
        self._rests: dict[tuple[str, str], tuple[float, str]] = {}

    def order(self) -> list[Tier]:
        """All tiers, those that failed lately behind the others."""
        return sorted(self._tiers, key=self._demerits)

    def rest_s(self, tier: Tier, blob: BlobRef) -> float:
        """For how many seconds yet ``tier`` does not want to be asked about the repository."""
        until_s, _ = self._rests.get((tier.name, blob.repository), (0.0, ""))
        return max(0.0, until_s - self._clock.monotonic_s())

    def why_rest(self, tier: Tier, blob: BlobRef) -> str:
        """What ``tier`` said when it asked to be left in peace about the repository."""
        return self._rests.get((tier.name, blob.repository), (0.0, ""))[1]

    def worked(self, tier: Tier) -> None:
        """``tier`` gave what was asked for."""
        self._records[id(tier)].failures = 0

    def failed(self, tier: Tier) -> None:
        """``tier`` neither gave what was asked for nor had a good reason."""
        record = self._records[id(tier)]
        record.failures += 1
        record.failed_at_s = self._clock.monotonic_s()

    def busy(self, tier: Tier, blob: BlobRef, retry_after_s: float | None, why: str) -> None:
        """``tier`` asked to be left in peace; without a word for how long, for a short while."""
        now_s = self._clock.monotonic_s()
        if len(self._rests) >= _MOST_RESTS:
            self._rests = {key: rest for key, rest in self._rests.items() if rest[0] > now_s}
        if len(self._rests) < _MOST_RESTS:
            rest_s = self._busy_s if retry_after_s is None else retry_after_s
            self._rests[tier.name, blob.repository] = (now_s + rest_s, why)

    def _demerits(self, tier: Tier) -> int:
        record = self._records[id(tier)]
        age_s = self._clock.monotonic_s() - record.failed_at_s
        return record.failures if age_s < self._forgive_s else 0
