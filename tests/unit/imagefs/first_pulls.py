"""First pulls whose origin is a dictionary and whose views are in memory."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import (
    EmberError,
    NoSpaceError,
)
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.rates import Rates
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.imagefs.parts import Staged


def sha256(data: bytes) -> Digest:
    return Digest("sha256", hashlib.sha256(data).hexdigest())


def plain_layer(content: bytes, name: str = "file") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


class Scene:
    """An ingest whose origin is a dictionary."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.error: EmberError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.clock = SkippingClock()
        self.opened = 0
        self.part_s = 0.0
        self.faulty = 1000
        self.suspected: list[BlobRef] = []
        self.staged: list[Staged] = []
        self.room_bytes = 1 << 30
        self.disk_fault: OSError | None = None
        self.directory = directory
        self.received: list[int] = []
        self.refused: list[tuple[Digest, str]] = []
        self.ingest = Ingest(
            self,
            self.stage,
            directory,
            self.refuse,
            pool,
            self.clock,
            parallel=2,
            rates=Rates(1000, self.clock),
            received=self.received.append,
        )

    async def stream(self, blob: BlobRef) -> AsyncIterator[bytes]:
        self.opened += 1
        data = self.blobs[blob.digest]
        for start in range(0, len(data), 100_000):
            await self.gate.wait()
            self.clock.now_s += self.part_s
            yield data[start : start + 100_000]
        if self.error is not None and self.opened <= self.faulty:
            raise self.error

    async def stage(self, view: Digest, at_least_bytes: int) -> Staged:
        if at_least_bytes > self.room_bytes:
            raise NoSpaceError("no space for chunks")
        if self.disk_fault is not None:
            raise self.disk_fault
        self.staged.append(Staged())
        return self.staged[-1]

    def suspect(self, blob: BlobRef) -> None:
        self.suspected.append(blob)

    async def refuse(self, blob: Digest, diff_id: Digest, reason: str) -> None:
        self.refused.append((blob, reason))

    def has_index(self, blob: BlobRef) -> bool:
        return (self.directory / f"{blob.digest.hex}.idx").exists()

    def add(self, blob: bytes, named: bytes | None = None) -> BlobRef:
        digest = sha256(named if named is not None else blob)
        self.blobs[digest] = blob
        return BlobRef("r.example/app", digest, len(blob))


PLAIN = plain_layer(bytes(range(256)) * 4000)
