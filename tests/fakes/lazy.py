"""Lazy layers in memory: which layers are taken, when they become readable, what was asked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from snapshotter.content import Digest
from snapshotter.errors import UnavailableError
from snapshotter.snapshots.lazy import LayerClaim, LazyLayer, StackEntry
from snapshotter.snapshots.model import Usage


def digest(text: str) -> Digest:
    """A digest that is the same for the same text."""
    return Digest("sha256", hashlib.sha256(text.encode()).hexdigest())


class FakeLazyLayers:
    """Takes the chainIDs in ``taken``. A mounted layer is a directory that its link leads to."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.unfit: set[Digest] = set()
        self.claims: list[LayerClaim] = []
        self.mounted: set[int] = set()
        self.waits_s: list[float] = []
        self.released: list[StackEntry] = []
        self.ready = True
        self.claim_error: Exception | None = None
        self.release_error: Exception | None = None
        self.claimed = asyncio.Event()
        self.claim_gate = asyncio.Event()
        self.claim_gate.set()
        self.mount_gate = asyncio.Event()
        self.mount_gate.set()
        self.release_gate = asyncio.Event()
        self.release_gate.set()

    async def claim(self, claim: LayerClaim) -> LazyLayer | None:
        self.claims.append(claim)
        self.claimed.set()
        await self.claim_gate.wait()
        if self.claim_error is not None:
            raise self.claim_error
        if claim.chain_id not in self.taken:
            return None
        return LazyLayer(digest("layer " + claim.chain_id), digest("view " + claim.chain_id))

    def is_fit(self, layer: Digest, view: Digest) -> bool:
        return layer not in self.unfit

    async def mount(self, stack: Sequence[StackEntry], wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await self.mount_gate.wait()
        if not self.ready:
            raise UnavailableError("layer 1 of 2: 3 of 10 MiB are here")
        for entry in stack:
            if entry.layer is not None and not entry.directory.is_symlink():
                place = entry.directory.with_name("mounted")
                place.mkdir()
                entry.directory.symlink_to(place)
                self.mounted.add(entry.snapshot_id)

    async def release(self, entry: StackEntry) -> None:
        self.released.append(entry)
        await self.release_gate.wait()
        if self.release_error is not None:
            raise self.release_error
        self.mounted.discard(entry.snapshot_id)

    async def usage(self, entry: StackEntry) -> Usage:
        return Usage(4096, 1)
