"""What hangs costs those who need it, not others: the road over a real client and real sockets.

With the limits that the daemon makes of its configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from snapshotter.clock import SystemClock
from snapshotter.config import Config, parse
from snapshotter.content import Digest
from snapshotter.daemon.opening import road_limits, transport_limits
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.tiers.registry import RegistryTier
from tests.fakes.registry import FakeRegistry, cut
from tests.unit.fetch.conftest import Bench
from tests.unit.image.layers import text

CROWDED, OTHER = text(400_000, seed=1), text(100_000, seed=2)
READERS = 45


@asynccontextmanager
async def road_over(bench: Bench, config: Config, certs: Path) -> AsyncIterator[None]:
    """The bench's road asks real registries."""
    await bench.close()
    settings = RegistrySettings(
        certs_dirs=(certs,), docker_configs=(), limits=transport_limits(config)
    )
    client = open_registry(settings, SystemClock(), environment={})
    limits = replace(road_limits(config), gap_bytes=0, join_bytes=4096)
    await bench.open(limits, wrap=lambda tier: RegistryTier(client))
    try:
        yield
    finally:
        await bench.road.close()
        await client.close()


def add(bench: Bench, registry: FakeRegistry, repository: str, plain: bytes) -> Digest:
    registry.add_blob(repository, plain)
    return bench.layers.add(plain, plain, bench.tiers, where=f"{registry.authority}/{repository}")


async def test_readers_of_a_blob_that_hangs_leave_room_for_another_image(
    bench: Bench, tmp_path: Path
) -> None:
    async with FakeRegistry() as registry:
        crowded = add(bench, registry, "crowded", CROWDED)
        other = add(bench, registry, "other", OTHER)
        registry.inject(cut(0, "hang"), lambda seen: "/crowded/" in seen.path)
        async with road_over(bench, parse("", "test"), tmp_path), asyncio.timeout(20):
            readers = [
                asyncio.create_task(bench.read(crowded, n * 8192, 1000)) for n in range(READERS)
            ]
            await registry.until_asked(16)
            for offset in range(0, len(OTHER), 10_000):
                part = OTHER[offset : offset + 10_000]
                assert await bench.read(other, offset, 10_000) == part
            assert len(registry.asked("/crowded/")) == 16
            assert not [reader for reader in readers if reader.done()]
            registry.heal()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            assert await bench.read(crowded, 0, len(CROWDED)) == CROWDED


async def test_a_silent_mirror_is_passed_by_within_the_read_that_meets_it(
    bench: Bench, tmp_path: Path
) -> None:
    async with FakeRegistry() as registry, FakeRegistry() as mirror:
        view = add(bench, registry, "app", OTHER)
        mirror.inject(cut(-1, "hang"))
        hosts = tmp_path / "certs" / registry.authority / "hosts.toml"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(
            f'server = "{registry.url}"\n[host."{mirror.url}"]\ncapabilities = ["pull"]\n'
        )
        config = parse("[registry]\nread_timeout = 0.2\n", "test")
        async with road_over(bench, config, tmp_path / "certs"), asyncio.timeout(20):
            assert await bench.read(view, 0, 1000) == OTHER[:1000]
            assert bench.road.tally(view).last_failure == ""
            assert await bench.read(view, 50_000, 1000) == OTHER[50_000:51_000]
            assert len(mirror.seen) == 1
