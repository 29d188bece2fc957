"""HTTP/2 in the client: when it is chosen, and how it ends without anybody noticing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Extent
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.registry import RegistryClient
from tests.fakes.certificates import Authority
from tests.fakes.clients import read, registry_client, secure_registry_with, stream
from tests.fakes.http_server import Answer, Seen
from tests.fakes.proxy import TunnelProxy
from tests.fakes.registry import FakeRegistry, cut, is_range

DATA = random.Random(9).randbytes(3_000_000)
LIMITS = TransportLimits(connect_s=5, idle_s=5, connections_per_host=4)
NAMED = "registry.test:443"
SMALL, LARGE = 10_000, 2_000_000


@dataclass
class Scene:
    registry: FakeRegistry
    blob: BlobRef
    client: RegistryClient

    async def read(self, offset: int, length: int = SMALL) -> None:
        extent = Extent(offset, length)
        assert await read(self.client, self.blob, extent) == DATA[offset : extent.end]

    async def burst(self, count: int) -> None:
        await asyncio.gather(*(self.read(number * SMALL) for number in range(count)))

    async def until_spoken(self) -> None:
        """Read more at a time than there may be connections, until some goes over HTTP/2."""
        while not self.over_http2():
            await self.burst(2 * LIMITS.connections_per_host)
        self.registry.seen.clear()

    def over_http2(self) -> list[Seen]:
        return [seen for seen in self.registry.seen if seen.http2]


@asynccontextmanager
async def scene(
    folder: Path,
    *,
    http2: bool = True,
    limits: TransportLimits = LIMITS,
    environment: dict[str, str] | None = None,
    place: str = "",
) -> AsyncIterator[Scene]:
    async with (
        asyncio.timeout(30),
        secure_registry_with(DATA, folder, http2=http2, place=place) as (registry, blob),
        registry_client(certs=folder, limits=limits, environment=environment) as client,
    ):
        yield Scene(registry, blob, client)


async def test_small_reads_that_would_need_a_connection_share_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()
        connections = at.registry.connections
        assert connections <= LIMITS.connections_per_host + 1
        await at.burst(12)
        assert len(at.over_http2()) >= 12 - LIMITS.connections_per_host
        assert at.registry.connections == connections


async def test_an_idle_connection_is_used_first(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()
        for number in range(5):
            await at.read(number)
        assert at.over_http2() == []


async def test_what_is_large_has_a_connection_of_its_own(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()
        reads = [at.read(n, LARGE) for n in range(2)]
        streams = [stream(at.client, at.blob) for _ in range(2)]
        await asyncio.gather(*reads, *streams)
        assert at.over_http2() == []


async def test_a_second_ask_never_shares_a_connection(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()

        async def again(number: int) -> None:
            extent = Extent(number * SMALL, SMALL)
            async with aclosing(at.client.read(at.blob, extent, elsewhere=True)) as pieces:
                got = b"".join([piece async for piece in pieces])
            assert got == DATA[extent.offset : extent.end]

        await asyncio.gather(*map(again, range(12)))
        assert len(at.registry.seen) >= 12
        assert at.over_http2() == []


async def test_small_reads_do_not_queue_behind_large_ones(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()
        at.registry.inject(cut(1000, "hang"), lambda seen: seen.headers.get("range") is None)
        large = [asyncio.ensure_future(stream(at.client, at.blob)) for _ in range(4)]
        await at.registry.until_asked(4)
        at.registry.seen.clear()
        await at.burst(30)
        assert len(at.over_http2()) == 30
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)


async def test_a_registry_without_http2_is_tried_once(tmp_path: Path) -> None:
    async with scene(tmp_path, http2=False) as at:
        for _ in range(5):
            await at.burst(4)
        of_a_request = Counter(seen.connection for seen in at.registry.seen)
        assert at.over_http2() == []
        assert at.registry.connections <= len(of_a_request) + 1


async def test_through_a_proxy_it_is_not_tried(tmp_path: Path) -> None:
    async with TunnelProxy(0) as proxy:
        environment = {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.port}"}
        async with scene(tmp_path, environment=environment, place=NAMED) as at:
            proxy.lead_to(at.registry.port)
            for _ in range(3):
                await at.burst(4)
            assert at.over_http2() == []
            assert len(proxy.asked) == at.registry.connections


async def test_a_server_that_goes_away_in_good_order_costs_nobody_a_read(tmp_path: Path) -> None:
    def goes_away(seen: Seen, answer: Answer) -> Answer:
        answer.last = seen.http2 and seen.turn % 5 == 0
        answer.drip_bytes, answer.drip_delay_s = 2000, 0.002
        return answer

    async with scene(tmp_path) as at:
        await at.until_spoken()
        at.registry.inject(goes_away)
        for _ in range(5):
            await at.burst(16)
        assert at.over_http2()


async def test_a_connection_that_was_closed_while_idle_costs_nobody_a_read(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        for _ in range(3):
            await at.until_spoken()
            await at.registry.stop()
            await at.registry.start()
            await at.burst(8)
            assert len(at.registry.seen) >= 8


@pytest.mark.parametrize("after", [-1, 1000])
async def test_streams_that_break_leave_the_others_alone(tmp_path: Path, after: int) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()
        at.registry.inject(cut(after, "reset"), lambda seen: is_range(seen) and seen.http2)
        reads = [asyncio.ensure_future(at.read(n * SMALL)) for n in range(8)]
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert [error for error in done if error is None], done


async def test_what_is_trusted_no_more_is_not_read_from_over_a_kept_connection(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as at:
        await at.until_spoken()
        authority = tmp_path / "authority.pem"
        other = tmp_path / "other"
        other.mkdir()
        authority.write_bytes(Authority(other).path.read_bytes())
        reads = [at.read(n * SMALL) for n in range(12)]
        refused = await asyncio.gather(*reads, return_exceptions=True)
        assert ["is not trusted" in str(error) for error in refused] == [True] * 12
        assert at.registry.seen == []


async def test_what_is_no_http2_is_gone_around_and_not_tried_again(tmp_path: Path) -> None:
    spoken = 0

    async def nonsense(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        nonlocal spoken
        spoken += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
        await reader.read()

    async with scene(tmp_path) as at:
        at.registry.http2 = nonsense
        for _ in range(6):
            await at.burst(12)
        assert spoken == 1


async def test_an_answer_whose_status_is_none_is_gone_around_too(tmp_path: Path) -> None:
    def change(seen: Seen, answer: Answer) -> Answer:
        answer.status = -answer.status
        return answer

    async with scene(tmp_path) as at:
        at.registry.inject(change, lambda seen: seen.http2)
        while not at.over_http2():
            await at.burst(12)
        at.registry.seen.clear()
        for _ in range(3):
            await at.burst(12)
        assert at.registry.seen and not at.over_http2()


async def test_a_connection_that_nobody_uses_is_closed(tmp_path: Path) -> None:
    limits = replace(LIMITS, keep_s=0.05)
    closed = asyncio.Event()
    async with scene(tmp_path, limits=limits) as at:
        serve = at.registry.http2
        assert serve is not None

        async def watched(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
        ) -> None:
            await serve(reader, writer, connection)
            closed.set()

        at.registry.http2 = watched
        await at.until_spoken()
        await closed.wait()
        await at.burst(8)
        assert at.registry.seen
