"""The client against registries with bad manners: what it brings is right, soon, and costs little.

A read is tried as often as its caller likes, as the road does; a stream takes itself up again.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Extent
from snapshotter.errors import EmberError, LengthError, RangeUnsupportedError, UnavailableError
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.retry import Patience, retrying
from tests.fakes.clients import read, registry_client, registry_with, secure_registry_with, stream
from tests.fakes.hostile import manners
from tests.fakes.skipping_clock import SkippingClock

DATA = random.Random(3).randbytes(600_000)
READS, PIECE_BYTES, AT_ONCE = 80, 5000, 8
LIMIT_S = 20
LIMITS = TransportLimits(connect_s=2, idle_s=0.5, connections_per_host=AT_ONCE)
WITHOUT_RANGES = {"ignores ranges", "ignores some ranges"}
"""What ignores ranges once is asked for the whole from then on, by whoever reads."""


async def read_often(client: RegistryClient, blob: BlobRef, clock: SkippingClock) -> list[bytes]:
    room = asyncio.Semaphore(AT_ONCE)
    patience = Patience(attempts=12, longest_pause_s=600)

    async def honestly(extent: Extent) -> bytes:
        try:
            return await read(client, blob, extent)
        except LengthError as error:  # a lie that was found out
            raise UnavailableError(str(error)) from error

    async def one(number: int) -> bytes:
        extent = Extent(number * PIECE_BYTES, PIECE_BYTES)
        async with room:
            return await retrying(lambda: honestly(extent), clock, patience)

    return await asyncio.gather(*(one(number) for number in range(READS)))


@pytest.mark.parametrize("manner", sorted(manners().keys() - WITHOUT_RANGES))
async def test_reads_over_http2_bring_right_bytes_too(tmp_path: Path, manner: str) -> None:
    clock = SkippingClock()
    limits = replace(LIMITS, connections_per_host=2)
    async with (
        asyncio.timeout(LIMIT_S),
        secure_registry_with(DATA, tmp_path) as (registry, blob),
        registry_client(certs=tmp_path, limits=limits, clock=clock) as client,
    ):
        while not [seen for seen in registry.seen if seen.http2]:
            await asyncio.gather(*(read(client, blob, Extent(0, 10)) for _ in range(AT_ONCE)))
        manners()[manner](registry)
        registry.seen.clear()
        found = await read_often(client, blob, clock)
        assert b"".join(found) == DATA[: READS * PIECE_BYTES]
        assert len(registry.asked("/blobs/")) <= 2 * READS
        assert [seen for seen in registry.seen if seen.http2]


@pytest.mark.parametrize("manner", sorted(manners().keys() - WITHOUT_RANGES))
async def test_reads_bring_right_bytes_for_few_requests_more(manner: str) -> None:
    clock = SkippingClock()
    async with (
        asyncio.timeout(LIMIT_S),
        registry_with(DATA) as (registry, blob),
        registry_client(limits=LIMITS, clock=clock) as client,
    ):
        manners()[manner](registry)
        found = await read_often(client, blob, clock)
        assert b"".join(found) == DATA[: READS * PIECE_BYTES]
        assert len(registry.asked("/blobs/")) <= 2 * READS


@pytest.mark.parametrize("manner", sorted(WITHOUT_RANGES))
async def test_a_registry_that_ignores_ranges_is_found_out_at_once(manner: str) -> None:
    clock = SkippingClock()
    async with (
        asyncio.timeout(LIMIT_S),
        registry_with(DATA) as (registry, blob),
        registry_client(limits=LIMITS, clock=clock) as client,
    ):
        manners()[manner](registry)
        with pytest.raises(RangeUnsupportedError):
            await read_often(client, blob, clock)
        asked = len(registry.seen)
        assert asked <= 10 + AT_ONCE
        with pytest.raises(RangeUnsupportedError):
            await read(client, blob, Extent(0, 10))
        assert len(registry.seen) == asked
        assert await stream(client, blob) == DATA


@pytest.mark.parametrize("manner", manners())
async def test_streams_bring_right_bytes_for_few_requests_more(manner: str) -> None:
    streams = 4
    clock = SkippingClock()
    async with (
        asyncio.timeout(LIMIT_S),
        registry_with(DATA) as (registry, blob),
        registry_client(limits=LIMITS, clock=clock) as client,
    ):
        manners(nth=3)[manner](registry)
        patience = Patience(attempts=8, longest_pause_s=600)
        work = [retrying(lambda: stream(client, blob), clock, patience) for _ in range(streams)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert [str(error) for error in found if isinstance(error, EmberError)] == []
        assert found == [DATA] * streams
        assert len(registry.asked("/blobs/")) <= 6 * streams
