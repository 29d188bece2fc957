"""A pull of an image, and which of containerd's questions belong to it.

containerd asks layer by layer, and says of none which pull it is of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from snapshotter.imagefs.catalog import Layer
from snapshotter.snapshots.lazy import LayerClaim

HOLDS_S = 60.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for all layers of an image."""

    lazy: bool
    reason: str
    layers: tuple[Layer, ...]
    made_s: float


@dataclass(slots=True)
class Pull:
    """What was decided for a pull of an image, and the chains that were answered with it."""

    reference: str | None
    decision: Decision
    claimed_s: float
    answered: set[str] = field(default_factory=set)

    def has(self, claim: LayerClaim, now_s: float) -> bool:
        """Whether ``claim`` belongs to this pull, so that what was decided holds for it too.

        A lazy pull is over within moments: nothing is fetched between its layers. One that
        containerd does itself may take an hour, and indexing begins meanwhile: it goes on with the
        layer above each that it was left, and other clients come to it while that is unpacked.
        Of a pull that failed the snapshot stays until containerd collects its garbage.
        """
        if self.decision.lazy:  # what one repository gives is no other's to give
            young = now_s - self.decision.made_s < HOLDS_S
            return young and claim.image_ref == self.reference
        if claim.being_unpacked and now_s - self.claimed_s < HOLDS_S:
            return True
        parent = claim.below[-1].chain_id if claim.below else None
        return parent in self.answered and claim.chain_id not in self.answered

    def answer(self, claim: LayerClaim, now_s: float) -> Decision:
        """The decision, for ``claim`` too."""
        self.claimed_s = now_s
        self.answered.add(claim.chain_id)
        return self.decision
