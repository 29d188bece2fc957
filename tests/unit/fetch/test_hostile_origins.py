"""The road over registries with bad manners: right bytes, soon, and without a storm of requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.clock import SystemClock
from snapshotter.config import parse
from snapshotter.content import Digest
from snapshotter.daemon.opening import road_limits, transport_limits
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.tiers.hedged import HedgedTier
from snapshotter.tiers.registry import RegistryTier
from tests.fakes.hostile import manners, throttles
from tests.fakes.registry import FakeRegistry
from tests.unit.fetch.conftest import Bench
from tests.unit.image.layers import text

PLAIN = text(400_000, seed=3)
MANNERS = manners()


@asynccontextmanager
async def hedged_road(
    bench: Bench, registry: FakeRegistry, plain: bytes, window_bytes: int = 40_000
) -> AsyncIterator[Digest]:
    """The bench's road asks ``registry`` as the daemon would; the view of ``plain`` there."""
    await bench.close()
    config = parse("", "test")
    settings = RegistrySettings(
        certs_dirs=(Path("/nonexistent"),), docker_configs=(), limits=transport_limits(config)
    )
    client = open_registry(settings, SystemClock(), environment={})
    first, second = RegistryTier(client), RegistryTier(client, elsewhere=True)
    await bench.open(
        replace(
            road_limits(config),
            gap_bytes=0,
            gap_most_bytes=0,
            join_bytes=4096,
            window_bytes=window_bytes,
        ),
        wrap=lambda tier: HedgedTier(first, second, SystemClock(), lagging=client.lagging),
    )
    registry.add_blob("team/app", plain)
    view = bench.layers.add(plain, plain, bench.tiers, where=f"{registry.authority}/team/app")
    try:
        yield view
    finally:
        await bench.road.close()
        await client.close()


@pytest.mark.parametrize("manner", [name for name in MANNERS if name != "ignores ranges"])
async def test_readers_get_right_bytes_soon_whatever_the_registry_does(
    bench: Bench, manner: str
) -> None:
    async with FakeRegistry() as registry, hedged_road(bench, registry, PLAIN) as view:
        await bench.read(view, 0, 10)
        manners()[manner](registry)
        chance = random.Random(manner)
        places = [(chance.randrange(len(PLAIN)), chance.randrange(1, 9000)) for _ in range(40)]
        async with asyncio.timeout(15):  # a silent connection alone would cost 30 seconds
            for at in range(0, len(places), 8):
                some = places[at : at + 8]
                got = await asyncio.gather(*(bench.read(view, *place) for place in some))
                assert got == [PLAIN[offset : offset + length] for offset, length in some]
        assert len(registry.asked("/blobs/")) < 4 * len(places)


async def test_a_registry_that_throttles_each_connection_is_read_over_many(bench: Bench) -> None:
    plain = text(4_000_000, seed=4)
    async with (
        FakeRegistry() as registry,
        hedged_road(bench, registry, plain, window_bytes=100_000) as view,
    ):
        throttles(150_000)(registry)
        async with asyncio.timeout(15):  # over one connection it takes 27 seconds
            await bench.road.complete(view, at_once=16)
        assert bench.road._crew.origins.of(registry.authority).allowed >= 8
