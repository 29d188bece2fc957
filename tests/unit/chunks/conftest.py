"""Views with known content, and stores over one directory that are started again and again."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3

from ioengine.buffers import BufferPool
from ioengine.engine import IoEngine
from ioengine.threads import ThreadEngine
from snapshotter.chunks.space import Evict, SpaceLimits, evict_nothing
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.content import Digest

CHUNK = 4096
BOOT, NEXT_BOOT = b"a" * 16, b"b" * 16
NO_LIMITS = SpaceLimits(ballast_bytes=0, keep_free_bytes=0)
VIEW = Digest("sha256", "ab" * 32)


class Content:
    """A view's true bytes, and the digests an index would have for them."""

    def __init__(self, length: int, seed: int = 1) -> None:
        self.data = random.Random(seed).randbytes(length)
        self.count = -(-length // CHUNK)

    def chunk(self, number: int) -> bytes:
        return self.data[number * CHUNK : (number + 1) * CHUNK]

    def digest(self, number: int) -> bytes:
        return blake3(self.chunk(number)).digest()


@pytest.fixture
async def engine() -> AsyncIterator[ThreadEngine]:
    engine = ThreadEngine.open(BufferPool(4, 64 * 1024), workers=2)
    yield engine
    await engine.close()


class Stores:
    """Makes stores over one directory, as a daemon does that is started again and again."""

    def __init__(self, root: Path, engine: IoEngine) -> None:
        self.root = root
        self.engine = engine
        self.mounted: set[Path] = set()

    async def start(
        self, boot: bytes = BOOT, space: SpaceLimits = NO_LIMITS, evict: Evict = evict_nothing
    ) -> ViewStore:
        config = StoreConfig(self.root, chunk_bytes=CHUNK, space=space)
        store = ViewStore(
            config, self.engine, in_use=self.mounted.__contains__, evict=evict, boot=boot
        )
        await store.start()
        return store


@pytest.fixture
def stores(tmp_path: Path, engine: ThreadEngine) -> Stores:
    return Stores(tmp_path / "root", engine)
