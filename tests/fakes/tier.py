"""A tier in memory: serves the blobs it was given, and does on request what bad tiers do.

``faults`` are functions that are asked before each read and may raise, cut, change or hold the
bytes; ``SeededFaults`` draws them from one seed, so the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import (
    BusyError,
    CorruptError,
    NotFoundError,
    RangeUnsupportedError,
    UnauthorizedError,
    UnavailableError,
)


@dataclass(slots=True)
class SeededFaults:
    """With ``rate`` a read goes wrong in one of the ways that have been met."""

    seed: int
    rate: float = 0.3
    ways: tuple[str, ...] = (
        "busy",
        "missing",
        "unauthorized",
        "unavailable",
        "short",
        "long",
        "broken",
        "flipped",
        "rangeless",
        "refused range",
    )
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def draw(self) -> str:
        """The way in which the next read goes wrong, or nothing."""
        return self.chance.choice(self.ways) if self.chance.random() < self.rate else ""


@dataclass(slots=True)
class Asked:
    """One read that was asked for; ``extent`` None: the whole blob."""

    digest: Digest
    extent: Extent | None
    demand: bool


class FakeTier:
    """See above. ``pieces_bytes`` is how much it gives at a time."""

    def __init__(self, name: str = "fake", *, piece_bytes: int = 5000) -> None:
        self.name = name
        self.blobs: dict[Digest, bytes] = {}
        self.asked: list[Asked] = []
        self.suspected: list[Digest] = []
        self.script: list[str] = []
        """Ways to go wrong, one for each next read; then the seeded ones, if any."""
        self.faults: SeededFaults | None = None
        self.always = ""
        self.retry_after_s: float | None = None
        self.gate = asyncio.Event()
        """Nothing is given while it is clear."""
        self.gate.set()
        self.open_reads = 0
        self.sent_bytes = 0
        self._piece_bytes = piece_bytes

    def add(self, repository: str, data: bytes, digest: Digest) -> BlobRef:
        """Serve ``data`` as ``digest``."""
        self.blobs[digest] = data
        return BlobRef(repository, digest, len(data))

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> AsyncGenerator[bytes, None]:
        self.asked.append(Asked(blob.digest, extent, demand))
        return self._send(blob, extent, self._way())

    def stream(self, blob: BlobRef, *, demand: bool) -> AsyncGenerator[bytes, None]:
        self.asked.append(Asked(blob.digest, None, demand))
        way = self._way()
        return self._send(
            blob, Extent(0, blob.size_bytes), "" if way in ("rangeless", "refused range") else way
        )

    def suspect(self, blob: BlobRef) -> None:
        self.suspected.append(blob.digest)

    def _way(self) -> str:
        if self.script:
            return self.script.pop(0)
        if self.always:
            return self.always
        return self.faults.draw() if self.faults is not None else ""

    async def _send(self, blob: BlobRef, extent: Extent, way: str) -> AsyncGenerator[bytes, None]:
        self.open_reads += 1
        try:
            await asyncio.sleep(0)
            self._refuse(blob, way)
            for piece in self._pieces(self.blobs[blob.digest], extent, way):
                await self.gate.wait()
                self.sent_bytes += len(piece)
                yield piece
                await asyncio.sleep(0)
                if way == "broken" and self.sent_bytes % 2:
                    break
            if way == "broken":
                raise UnavailableError(f"{self.name}: connection reset")
            if way == "hang":
                await asyncio.Event().wait()
        finally:
            self.open_reads -= 1

    def _refuse(self, blob: BlobRef, way: str) -> None:
        if way == "busy":
            raise BusyError(f"{self.name}: too many requests", self.retry_after_s)
        if way == "missing" or blob.digest not in self.blobs:
            raise NotFoundError(f"{self.name}: no such blob")
        if way == "unauthorized":
            raise UnauthorizedError(f"{self.name}: who are you")
        if way == "unavailable":
            raise UnavailableError(f"{self.name}: 503")
        if way == "rangeless":
            raise RangeUnsupportedError(f"{self.name}: 200 to a range")
        if way == "refused range":
            raise CorruptError(f"{self.name}: wrong Content-Range")

    def _pieces(self, data: bytes, extent: Extent, way: str) -> list[bytes]:
        body = bytearray(data[extent.offset : extent.end])
        if way == "short":
            del body[len(body) // 2 :]
        if way == "long":
            body += b"more than was asked for"
        if way == "flipped" and body:
            body[len(body) * 2 // 3] ^= 0x10
        if way in ("broken", "hang"):
            del body[len(body) * 2 // 3 :]
        size = self._piece_bytes
        return [bytes(body[at : at + size]) for at in range(0, len(body), size)]
