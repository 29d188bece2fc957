"""What a registry client does between a mirror and the registry itself."""

from __future__ import annotations

import contextlib
import itertools
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from snapshotter.clock import SystemClock
from snapshotter.content import Extent
from snapshotter.errors import (
    NotFoundError,
    UnavailableError,
)
from snapshotter.oci.limits import TransportLimits
from snapshotter.tiers.hedged import HedgedTier
from snapshotter.tiers.latency import HedgeLimits
from snapshotter.tiers.registry import RegistryTier
from tests.fakes.clients import read, registry_client, registry_with, stream
from tests.fakes.http_server import Answer
from tests.fakes.registry import (
    Change,
    FakeRegistry,
    answer_with,
    cut,
    flip,
    header,
    is_blob,
)
from tests.fakes.skipping_clock import SkippingClock

DATA = random.Random(7).randbytes(300_000)


def two_hosts(directory: Path, mirror: FakeRegistry, registry: FakeRegistry) -> Path:
    folder = directory / registry.authority
    folder.mkdir(parents=True)
    (folder / "hosts.toml").write_text(
        f'server = "{registry.url}"\n[host."{mirror.url}"]\ncapabilities = ["pull", "resolve"]\n'
    )
    return directory


async def test_a_mirror_is_asked_first_and_told_for_whom(tmp_path: Path) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        async with registry_client(certs=two_hosts(tmp_path, mirror, registry)) as client:
            assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
        assert [seen.query for seen in mirror.seen] == [{"ns": registry.authority}]
        assert registry.seen == []


@pytest.mark.parametrize(
    "fault",
    [
        answer_with(404),
        answer_with(500),
        answer_with(429),
        answer_with(401),
        cut(-1),
        cut(-1, "hang"),
        header("Content-Range", None),
        lambda seen, answer: Answer(200, [], DATA),
    ],
)
async def test_the_registry_is_asked_when_the_mirror_fails(tmp_path: Path, fault: Change) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        mirror.inject(fault)
        async with registry_client(certs=two_hosts(tmp_path, mirror, registry)) as client:
            assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
        assert [seen.query for seen in registry.seen] == [{}]


async def test_the_registry_s_own_answer_is_the_one_that_counts(tmp_path: Path) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        registry.inject(answer_with(404))
        async with registry_client(certs=two_hosts(tmp_path, mirror, registry)) as client:
            for fault in (answer_with(502), cut(-1), cut(-1)):
                mirror.heal()
                mirror.inject(fault)
                with pytest.raises(NotFoundError, match=r"404.*at other hosts.*blobs"):
                    await read(client, blob, Extent(10, 10))


async def test_a_host_whose_bytes_were_wrong_is_asked_last(tmp_path: Path) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        mirror.inject(flip(), is_blob)
        async with registry_client(certs=two_hosts(tmp_path, mirror, registry)) as client:
            assert await read(client, blob, Extent(10, 10)) != DATA[10:20]
            client.suspect(blob)
            assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
            await registry.stop()
            assert await read(client, blob, Extent(30, 10)) != DATA[30:40]


@pytest.mark.parametrize("fault", [cut(-1, "hang"), cut(-1, "reset"), cut(5)])
async def test_a_mirror_that_is_silent_costs_one_read_and_not_every_one(
    tmp_path: Path, fault: Change
) -> None:
    clock = SkippingClock()
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        mirror.inject(fault)
        certs = two_hosts(tmp_path, mirror, registry)
        async with registry_client(certs=certs, clock=clock) as client:
            with contextlib.suppress(UnavailableError):
                await read(client, blob, Extent(10, 10))
            asked = len(mirror.seen)
            for _ in range(5):
                assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
            assert len(mirror.seen) == asked
            mirror.heal()
            clock.now_s += 31
            await read(client, blob, Extent(10, 10))
            assert len(mirror.seen) == asked + 1


async def test_a_mirror_that_fails_whenever_it_is_tried_is_tried_ever_more_rarely(
    tmp_path: Path,
) -> None:
    clock = SkippingClock()
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        mirror.inject(cut(-1))
        certs = two_hosts(tmp_path, mirror, registry)
        async with registry_client(certs=certs, clock=clock) as client:
            tries = []
            for _ in range(240):  # an hour of reads every fifteen seconds
                asked = len(mirror.seen)
                assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
                tries += [clock.now_s] * (len(mirror.seen) > asked)
                clock.now_s += 15
            pauses = [round(later - earlier) for earlier, later in itertools.pairwise(tries)]
            assert pauses[:5] == [30, 60, 120, 240, 480]
            assert set(pauses[5:]) == {600}
            mirror.heal()
            clock.now_s += 600
            registry.seen.clear()
            assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
            assert registry.seen == []
            mirror.inject(cut(-1))
            await read(client, blob, Extent(10, 10))
            asked = len(mirror.seen)
            clock.now_s += 31
            await read(client, blob, Extent(10, 10))
            assert len(mirror.seen) > asked, "a failure after a success is a first one"


async def test_a_stream_that_breaks_at_the_mirror_goes_on_at_the_registry(tmp_path: Path) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        mirror.inject(cut(100_000))
        async with registry_client(certs=two_hosts(tmp_path, mirror, registry)) as client:
            assert await stream(client, blob) == DATA
        assert len(mirror.seen) == 1
        assert registry.seen[0].headers["range"] == "bytes=100000-299999"


async def test_ranged_reads_at_a_silent_mirror_cost_one_delay_and_then_none(
    tmp_path: Path,
) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        mirror.inject(cut(-1, "hang"))
        certs = two_hosts(tmp_path, mirror, registry)
        async with registry_client(certs=certs, limits=TransportLimits()) as client:
            tier = HedgedTier(
                RegistryTier(client),
                RegistryTier(client, elsewhere=True),
                SystemClock(),
                HedgeLimits(unknown_s=0.05),
                lagging=client.lagging,
            )
            for number in range(6):
                pieces = tier.read(blob, Extent(number * 1000, 1000), demand=True)
                async with aclosing(pieces):
                    got = b"".join([piece async for piece in pieces])
                assert got == DATA[number * 1000 : (number + 1) * 1000]
        assert len(mirror.asked("/blobs/")) == 3
        assert len(registry.asked("/blobs/")) == 6
