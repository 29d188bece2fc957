"""A road over a real store in a temporary directory, with tiers in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine
from snapshotter.chunks.space import Evict, SpaceLimits, evict_nothing
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.clock import Clock
from snapshotter.content import Digest, Extent
from snapshotter.fetch import LayerSource, Road, RoadLimits
from snapshotter.metrics import Metrics
from snapshotter.tiers.tier import Tier
from tests.fakes.tier import FakeTier
from tests.unit.image.layers import SMALL, index_of, sha256

QUICK = RoadLimits(
    miss_timeout_s=20.0,
    backoff_first_s=0.001,
    backoff_most_s=0.002,
    stall_s=5.0,
    window_bytes=100_000,
    join_bytes=8 * 1024,
    gap_bytes=0,
    gap_most_bytes=0,
    workers=2,
)


class Layers:
    """Sources by view, and where their blobs are served."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sources: dict[Digest, list[LayerSource]] = {}
        self.later: dict[Digest, list[LayerSource]] = {}
        """Sources that are found only when they are looked for."""

    def of_view(self, view: Digest) -> Sequence[LayerSource]:
        return self.sources.get(view, [])

    def look_further(self, view: Digest) -> None:
        self.sources[view] += self.later.pop(view, [])

    def add(
        self, plain: bytes, blob: bytes, tiers: Sequence[FakeTier], where: str = "r/app"
    ) -> Digest:
        """Index ``blob``, have ``tiers`` serve it; the view that it unpacks to."""
        index = index_of(blob, plain, self.directory)
        references = [tier.add(where, blob, index.layer) for tier in tiers]
        source = LayerSource(index, tuple(references[:1]))
        self.sources.setdefault(index.diff_id, []).append(source)
        return sha256(plain)


class Bench:
    """Makes stores and roads over one directory, and reads views as the kernel would."""

    def __init__(self, directory: Path, engine: ThreadEngine) -> None:
        (directory / "index").mkdir()
        self.layers = Layers(directory / "index")
        self.tier = FakeTier()
        self.tiers: list[FakeTier] = [self.tier]
        self.root = directory / "root"
        self.engine = engine
        self.metrics = Metrics()
        self.evict: Evict = evict_nothing
        self.store: ViewStore
        self.road: Road

    async def open(
        self,
        limits: RoadLimits = QUICK,
        clock: Clock | None = None,
        space: SpaceLimits | None = None,
        wrap: Callable[[FakeTier], Tier] | None = None,
        **changes: Any,
    ) -> Road:
        space = space or SpaceLimits(ballast_bytes=0, keep_free_bytes=0)
        config = StoreConfig(self.root, chunk_bytes=SMALL.chunk_bytes, space=space)
        self.store = ViewStore(
            config, self.engine, in_use=lambda path: False, evict=self.evict, boot=b"b" * 16
        )
        await self.store.start()
        tiers: list[Tier] = [wrap(tier) if wrap else tier for tier in self.tiers]
        self.road = Road(
            self.store,
            self.layers,
            tiers,
            limits=replace(limits, **changes),
            clock=clock,
            metrics=self.metrics,
            chance=random.Random(1),
        )
        return self.road

    async def close(self) -> None:
        await self.road.close()
        await self.store.close()

    async def read(
        self,
        view: Digest,
        offset: int,
        length: int,
        *,
        demand: bool = True,
        deadline_s: float | None = None,
    ) -> bytes:
        """The bytes of the view's file, after the road said that they are there."""
        await self.road.ensure(view, Extent(offset, length), demand=demand, deadline_s=deadline_s)
        opened = self.store.get(view)
        assert opened is not None
        with opened.path.open("rb") as file:
            file.seek(offset)
            return file.read(min(length, max(0, opened.length_bytes - offset)))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    engine = ThreadEngine.open(BufferPool(8, 64 * 1024), workers=2)
    bench = Bench(tmp_path, engine)
    await bench.open()
    yield bench
    await bench.close()
    await engine.close()


async def until(condition: Callable[[], bool], turns: int = 200_000) -> None:
    """Let the loop run until ``condition`` holds; threads are given their time."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be")
