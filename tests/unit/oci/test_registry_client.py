"""What a registry client must hold to, against a registry on a real socket."""

from __future__ import annotations

import asyncio
import random

import pytest

from snapshotter.content import BlobRef, Extent
from snapshotter.errors import (
    CorruptError,
    DeadlineError,
    EmberError,
    NotFoundError,
    RangeUnsupportedError,
    UnauthorizedError,
    UnavailableError,
)
from snapshotter.oci.limits import TransportLimits
from tests.fakes.clients import read, registry_client, registry_with, stream
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import (
    Change,
    answer_with,
    cut,
    header,
    is_blob,
    is_range,
)
from tests.fakes.skipping_clock import SkippingClock

DATA = random.Random(7).randbytes(300_000)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (1000, 5000), (299_999, 1), (0, 299_999), (0, 300_000), (5, 0)]
)
async def test_a_read_brings_exactly_its_extent(offset: int, length: int) -> None:
    async with registry_with(DATA) as (_, blob), registry_client() as client:
        assert await read(client, blob, Extent(offset, length)) == DATA[offset : offset + length]


async def test_a_stream_brings_the_whole_blob() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        assert await stream(client, blob) == DATA
        assert [seen.method for seen in registry.seen] == ["GET"]


@pytest.mark.parametrize("data", [DATA, b"x", b""])
@pytest.mark.parametrize("to_a_range", [206, 200, 400, 501])
async def test_a_blob_that_can_be_read_is_found_out_with_a_byte_of_it(
    data: bytes, to_a_range: int
) -> None:
    async with registry_with(data) as (registry, blob), registry_client() as client:
        if to_a_range == 200:
            registry.inject(lambda seen, answer: Answer(200, body=data), is_range)
        elif to_a_range != 206:
            registry.inject(answer_with(to_a_range), is_range)
        await client.check(blob)
        asked = [seen.headers.get("range") for seen in registry.seen]
        assert asked[:1] == (["bytes=0-0"] if data else [None])
        assert asked[1:] == ([None] if data and to_a_range >= 400 else [])


@pytest.mark.parametrize(
    ("status", "error", "asked"),
    [(404, NotFoundError, 1), (403, UnauthorizedError, 1), (503, UnavailableError, 3)],
)
async def test_a_blob_that_cannot_be_read_is_found_out_too(
    status: int, error: type[EmberError], asked: int
) -> None:
    clock = SkippingClock()
    async with registry_with(DATA) as (registry, blob), registry_client(clock=clock) as client:
        registry.inject(answer_with(status), is_blob)
        with pytest.raises(error):
            await client.check(blob)
        assert len(registry.asked("/blobs/")) == asked


async def test_an_empty_blob_is_empty() -> None:
    async with registry_with(b"") as (_, blob), registry_client() as client:
        assert await stream(client, blob) == b""


async def test_connections_are_kept_for_the_next_read() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        for offset in range(20):
            await read(client, blob, Extent(offset, 100))
        assert registry.connections == 1


async def test_nobody_is_asked_for_a_head() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(403), lambda seen: seen.method == "HEAD")
        assert await read(client, blob, Extent(10, 10)) == DATA[10:20]


@pytest.mark.parametrize("status", [200, 400, 501])
async def test_an_origin_without_ranges_is_known_after_one_request(status: int) -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:

        def whole(seen: Seen, answer: Answer) -> Answer:
            return Answer(status, [], DATA)

        registry.inject(whole, is_range)
        for _ in range(5):
            with pytest.raises(RangeUnsupportedError) as caught:
                await read(client, blob, Extent(10, 10))
            assert not caught.value.retryable
        assert len(registry.seen) == 1
        assert await stream(client, blob) == DATA
        assert len(registry.seen) == 2


@pytest.mark.parametrize(
    "fault",
    [
        header("Content-Range", None),
        header("Content-Range", "bytes 0-9/300000"),
        header("Content-Range", "bytes 10-19/300001"),
        header("Content-Range", "bytes 10-18/300000"),
        header("Content-Range", "bytes=10-19/300000"),
        header("Content-Range", "bytes 10-19/300000, bytes 30-31/300000"),
        header("Content-Encoding", "gzip"),
        answer_with(416),
        lambda seen, answer: Answer(206, answer.headers, answer.body + b"x"),
        lambda seen, answer: Answer(206, answer.headers, answer.body[:-1]),
    ],
)
async def test_a_lie_about_the_range_is_a_failed_fetch(fault: Change) -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(fault, is_range)
        with pytest.raises(CorruptError):
            await read(client, blob, Extent(10, 10))
        registry.heal()
        assert await read(client, blob, Extent(10, 10)) == DATA[10:20]


async def test_an_unknown_total_is_allowed() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(header("Content-Range", "bytes 10-19/*"))
        assert await read(client, blob, Extent(10, 10)) == DATA[10:20]


@pytest.mark.parametrize("after", [-1, 0, 4000])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_that_breaks_is_unavailability(after: int, how: str) -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(cut(after, how))
        with pytest.raises(UnavailableError):
            await read(client, blob, Extent(1000, 100_000))


@pytest.mark.parametrize("after", [-1, 0, 4000])
async def test_a_registry_that_hangs_runs_into_the_deadline(after: int) -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(cut(after, "hang"))
        with pytest.raises(DeadlineError):
            await read(client, blob, Extent(1000, 100_000))


async def test_a_body_that_only_drips_runs_into_the_deadline() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:

        def drip(seen: Seen, answer: Answer) -> Answer:
            answer.drip_bytes, answer.drip_delay_s = 1, 0.05
            return answer

        registry.inject(drip)
        with pytest.raises(DeadlineError):
            await read(client, blob, Extent(1000, 1000))


async def test_no_connection_at_all_is_unavailability() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        await registry.stop()
        with pytest.raises(UnavailableError):
            await read(client, blob, Extent(1000, 1000))


async def test_a_body_of_unknown_length_is_held_to_the_extent() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:

        def longer(seen: Seen, answer: Answer) -> Answer:
            return Answer(answer.status, answer.headers, answer.body + b"more", chunked=True)

        registry.inject(longer, times=1)
        with pytest.raises(CorruptError):
            await read(client, blob, Extent(1000, 1000))

        def shorter(seen: Seen, answer: Answer) -> Answer:
            return Answer(answer.status, answer.headers, answer.body[:-1], send_length=False)

        registry.inject(shorter)
        with pytest.raises(UnavailableError):
            await read(client, blob, Extent(1000, 1000))


@pytest.mark.parametrize("how", ["close", "reset", "hang"])
async def test_a_stream_goes_on_where_its_connection_broke(how: str) -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(cut(100_000, how), times=2)
        assert await stream(client, blob) == DATA
        assert len(registry.seen) == 3
        first, second, third = (seen.headers.get("range") for seen in registry.seen)
        assert first is None
        assert second == "bytes=100000-299999"
        assert third == "bytes=200000-299999"


async def test_a_stream_goes_on_without_ranges_too() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(cut(100_000), times=1)
        registry.inject(lambda seen, answer: Answer(200, [], DATA), is_range)
        assert await stream(client, blob) == DATA
        assert len(registry.seen) == 3


async def test_a_stream_that_brings_too_little_is_given_up() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(cut(10))
        with pytest.raises(UnavailableError):
            await stream(client, blob)
        assert len(registry.seen) < 10


async def test_a_blob_of_another_length_than_promised_is_corrupt() -> None:
    async with registry_with(DATA) as (_, blob), registry_client() as client:
        longer = BlobRef(blob.repository, blob.digest, blob.size_bytes + 1)
        with pytest.raises(CorruptError):
            await stream(client, longer)
        with pytest.raises(CorruptError):
            await read(client, longer, Extent(10, 10))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, NotFoundError),
        (410, NotFoundError),
        (500, UnavailableError),
        (502, UnavailableError),
        (418, UnavailableError),
    ],
)
async def test_a_refusal_becomes_the_error_of_its_kind(status: int, error: type[Exception]) -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(status))
        with pytest.raises(error, match=rf"answered {status} \(TEST test\)"):
            await read(client, blob, Extent(10, 10))
        with pytest.raises(error):
            await stream(client, blob)


async def test_no_credentials_is_said_as_such() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(401))
        with pytest.raises(UnauthorizedError):
            await read(client, blob, Extent(10, 10))


async def test_many_reads_at_once_share_bounded_connections() -> None:
    limits = TransportLimits(connect_s=2, idle_s=5, connections_per_host=4)
    async with registry_with(DATA) as (registry, blob), registry_client(limits=limits) as client:
        extents = [Extent(offset * 1000, 1000) for offset in range(200)]
        found = await asyncio.gather(*(read(client, blob, extent) for extent in extents))
        assert b"".join(found) == DATA[:200_000]
        assert registry.connections <= 4


async def test_a_cancelled_read_gives_its_connection_up() -> None:
    limits = TransportLimits(connect_s=2, idle_s=5, connections_per_host=1)
    async with registry_with(DATA) as (registry, blob), registry_client(limits=limits) as client:
        registry.inject(cut(10, "hang"), times=1)
        task = asyncio.create_task(read(client, blob, Extent(0, 1000)))
        await registry.until_asked(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await read(client, blob, Extent(10, 10)) == DATA[10:20]


async def test_a_connection_closed_while_it_was_idle_is_no_error() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        for _ in range(3):
            assert await read(client, blob, Extent(10, 10)) == DATA[10:20]
            await registry.stop()
            await registry.start()
