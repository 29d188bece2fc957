"""Blobs behind redirects: followed, remembered, asked for again; secrets stay at home."""

from __future__ import annotations

import asyncio

import pytest

from snapshotter.content import Extent
from snapshotter.errors import (
    BusyError,
    CorruptError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
)
from snapshotter.oci.credentials import Credential, MemoryCredentials
from snapshotter.oci.redirects import signature_left_s
from tests.fakes.clients import read, registry_client, registry_with, stream
from tests.fakes.gates import BasicGate, Storage, TokenGate
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import (
    Change,
    FakeRegistry,
    answer_with,
    cut,
    header,
    is_blob,
    is_range,
    serve,
)
from tests.fakes.skipping_clock import SkippingClock

DATA = bytes(range(256)) * 1000
PART = Extent(10, 10)


async def test_authorization_stays_at_home() -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        storage = Storage(other)
        registry.gate = BasicGate({"user": "word"})
        storage.serve_for(registry)
        pulls = MemoryCredentials()
        pulls.put(blob.repository, Credential("user", "word"))
        async with registry_client(pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]
            assert await stream(client, blob) == DATA
        assert all("authorization" not in seen.headers for seen in other.seen)
        assert other.seen[0].headers["range"] == "bytes=10-19"


async def test_authorization_goes_along_to_another_path_at_home() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({"user": "word"})
        elsewhere = Answer(307, [("Location", "/v2/team/app/blobs/elsewhere")])
        registry.inject(lambda seen, answer: elsewhere, lambda seen: str(blob.digest) in seen.path)

        def guarded(seen: Seen, answer: Answer) -> Answer:
            return answer if answer.status == 401 else serve(seen, DATA)

        registry.inject(guarded, lambda seen: "elsewhere" in seen.path)
        pulls = MemoryCredentials()
        pulls.put(blob.repository, Credential("user", "word"))
        async with registry_client(pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]


async def test_the_target_is_remembered() -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        Storage(other).serve_for(registry)
        async with registry_client() as client:
            for offset in range(20):
                assert await read(client, blob, Extent(offset, 5)) == DATA[offset : offset + 5]
        assert len(registry.seen) == 1
        assert (registry.connections, other.connections) == (1, 1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 500])
async def test_an_expired_link_leads_back_to_the_registry(status: int) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        storage = Storage(other, status=status)
        gate = TokenGate(registry)
        storage.serve_for(registry)
        async with registry_client() as client:
            await read(client, blob, PART)
            storage.expire()
            assert await read(client, blob, PART) == DATA[10:20]
        assert storage.signed == 2
        assert gate.tokens == 1


async def test_a_link_is_not_used_past_its_time() -> None:
    clock = SkippingClock()
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        storage = Storage(other, extra=f"&Expires={int(clock.now_s) + 60}")
        storage.serve_for(registry)
        async with registry_client(clock=clock) as client:
            await read(client, blob, PART)
            clock.now_s += 50
            await read(client, blob, PART)
            assert storage.signed == 1
            clock.now_s += 6
            await read(client, blob, PART)
            assert storage.signed == 2


async def test_a_storage_that_moved_is_found_again() -> None:
    async with (
        registry_with(DATA) as (registry, blob),
        FakeRegistry() as old,
        FakeRegistry() as new,
    ):
        for place in (old, new):
            place.add_blob("team/app", DATA)
        Storage(old).serve_for(registry)
        async with registry_client() as client:
            await read(client, blob, PART)
            await old.stop()
            registry.heal()
            Storage(new).serve_for(registry)
            assert await read(client, blob, PART) == DATA[10:20]


async def test_a_storage_that_refuses_fresh_links_is_not_the_credential_s_fault() -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        storage = Storage(other)
        gate = TokenGate(registry)
        storage.serve_for(registry)
        other.inject(answer_with(403))
        async with registry_client() as client:
            with pytest.raises(UnavailableError, match="refused its link"):
                await read(client, blob, PART)
        assert gate.tokens == 1


async def test_a_busy_storage_is_left_alone() -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        Storage(other).serve_for(registry)
        other.inject(answer_with(503, ("Retry-After", "3")), times=1)
        clock = SkippingClock()
        async with registry_client(clock=clock) as client:
            for _ in range(5):
                with pytest.raises(BusyError):
                    await read(client, blob, PART)
            assert len(other.seen) == 1
            clock.now_s += 3
            assert await read(client, blob, PART) == DATA[10:20]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (header("Content-Range", None), CorruptError),
        (lambda seen, answer: Answer(200, [], DATA), RangeUnsupportedError),
        (answer_with(404), NotFoundError),
        (answer_with(500), UnavailableError),
        (cut(3), UnavailableError),
    ],
)
async def test_the_rules_of_ranges_hold_behind_a_redirect(
    fault: Change, error: type[Exception]
) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        Storage(other).serve_for(registry)
        other.inject(fault, is_range)
        async with registry_client() as client:
            with pytest.raises(error):
                await read(client, blob, PART)


@pytest.mark.parametrize(
    "location",
    [
        None,
        "",
        "ftp://example.com/x",
        "http://user:word@example.com/x",
        "http://",
        "http://host:port/",
        "http://[::1",
        "file:///etc/passwd",
        "http://h/" + "x" * 20_000,
    ],
)
async def test_a_redirect_to_nowhere_sensible_is_not_followed(location: str | None) -> None:
    async with registry_with(DATA) as (registry, blob):
        headers = [] if location is None else [("Location", location)]
        registry.inject(lambda seen, answer: Answer(307, headers))
        async with registry_client() as client:
            with pytest.raises(UnavailableError):
                await read(client, blob, PART)


async def test_redirects_without_end_are_given_up() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.inject(lambda seen, answer: Answer(307, [("Location", seen.target)]))
        async with registry_client() as client:
            with pytest.raises(UnavailableError, match="redirects"):
                await read(client, blob, PART)
        assert len(registry.seen) < 10


async def test_many_readers_go_back_to_the_registry_when_links_expire() -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as other:
        other.add_blob("team/app", DATA)
        storage = Storage(other)
        storage.serve_for(registry)
        async with registry_client() as client:
            await read(client, blob, PART)
            storage.expire()
            found = await asyncio.gather(*(read(client, blob, PART) for _ in range(20)))
            assert set(found) == {DATA[10:20]}
        assert is_blob(registry.seen[0])


@pytest.mark.parametrize(
    ("query", "left_s"),
    [
        ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=900", 900),
        ("X-Goog-Date=20231114T221220Z&X-Goog-Expires=900", 840),
        ("Expires=1700000100&Signature=x", 100),
        ("se=2023-11-14T22%3A14%3A20Z&sig=x", 60),
        ("se=2023-11-14&sig=x", -80_000),
        ("X-Amz-Expires=900", None),
        ("X-Amz-Date=now&X-Amz-Expires=900", None),
        ("Expires=soon", None),
        ("", None),
    ],
)
def test_a_signature_says_how_long_it_is_good(query: str, left_s: float | None) -> None:
    assert signature_left_s(f"https://storage/x?{query}", 1_700_000_000) == left_s
