"""What every tier must do, run by the fake, the registry behind its client, and the guards."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from snapshotter.clock import SystemClock
from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import (
    BusyError,
    CorruptError,
    EmberError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
)
from snapshotter.tiers.guarded import guarded
from snapshotter.tiers.hedged import HedgedTier
from snapshotter.tiers.latency import HedgeLimits
from snapshotter.tiers.registry import RegistryTier
from snapshotter.tiers.tier import Tier
from tests.fakes.clients import registry_client, registry_with
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, answer_with, cut, is_blob, is_range
from tests.fakes.tier import FakeTier

DATA = random.Random(11).randbytes(200_000)


@dataclass
class Subject:
    """A tier that serves DATA as ``blob``, and how to make its next reads go wrong."""

    tier: Tier
    blob: BlobRef
    spoil: Callable[[str], None]
    open_reads: Callable[[], int]


@asynccontextmanager
async def fake() -> AsyncIterator[Subject]:
    tier = FakeTier()
    blob = tier.add("r/app", DATA, Digest("sha256", "0d" * 32))

    def spoil(way: str) -> None:
        tier.always = way

    yield Subject(tier, blob, spoil, lambda: tier.open_reads)


def spoil_registry(server: FakeRegistry, way: str) -> None:
    def whole(seen: Seen, answer: Answer) -> Answer:
        answer.status, answer.body = 200, DATA
        answer.set("Content-Range", None)
        return answer

    server.heal()
    if way == "busy":
        server.inject(answer_with(429, ("Retry-After", "7")), is_blob)
    elif way == "unavailable":
        server.inject(answer_with(503), is_blob)
    elif way == "missing":
        server.inject(answer_with(404), is_blob)
    elif way == "rangeless":
        server.inject(whole, is_range)
    elif way == "short":
        server.inject(cut(1000), is_blob)


@asynccontextmanager
async def registry() -> AsyncIterator[Subject]:
    async with registry_with(DATA) as (server, blob), registry_client() as client:
        yield Subject(RegistryTier(client), blob, partial(spoil_registry, server), lambda: 0)


@asynccontextmanager
async def guarded_fake() -> AsyncIterator[Subject]:
    async with fake() as subject:
        subject.tier = guarded(subject.tier, stall_s=0.05)
        yield subject


@asynccontextmanager
async def guarded_registry() -> AsyncIterator[Subject]:
    async with registry() as subject:
        subject.tier = guarded(subject.tier)
        yield subject


@asynccontextmanager
async def hedged_fake() -> AsyncIterator[Subject]:
    async with fake() as subject:
        subject.tier = guarded(hedged(subject.tier, subject.tier))
        yield subject


@asynccontextmanager
async def hedged_registry() -> AsyncIterator[Subject]:
    """Every read is asked for twice, unless it is very fast."""
    async with registry_with(DATA) as (server, blob), registry_client() as client:
        yield Subject(
            hedged(RegistryTier(client), RegistryTier(client, elsewhere=True)),
            blob,
            partial(spoil_registry, server),
            lambda: 0,
        )


def hedged(tier: Tier, elsewhere: Tier) -> Tier:
    limits = HedgeLimits(unknown_s=0.0001, floor_s=0.0001, piece_floor_s=0.0001, ceiling_s=0.0001)
    return HedgedTier(tier, elsewhere, SystemClock(), limits)


SUBJECTS: list[Callable[[], AbstractAsyncContextManager[Subject]]] = [
    fake,
    registry,
    guarded_fake,
    guarded_registry,
    hedged_fake,
    hedged_registry,
]


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.__name__)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with request.param() as made:
        yield made


async def all_of(pieces: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(pieces):
        return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 200_000), (199_999, 1), (77, 60_001)])
async def test_a_read_gives_exactly_its_extent(subject: Subject, offset: int, length: int) -> None:
    pieces = subject.tier.read(subject.blob, Extent(offset, length), demand=True)
    assert await all_of(pieces) == DATA[offset : offset + length]
    assert subject.open_reads() == 0


async def test_a_stream_gives_the_whole_blob(subject: Subject) -> None:
    assert await all_of(subject.tier.stream(subject.blob, demand=False)) == DATA


async def test_a_tier_has_a_short_name(subject: Subject) -> None:
    assert subject.tier.name.isidentifier()


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("busy", BusyError),
        ("missing", NotFoundError),
        ("unavailable", UnavailableError),
        ("rangeless", RangeUnsupportedError),
        ("short", EmberError),
    ],
)
async def test_what_goes_wrong_has_its_own_error(
    subject: Subject, way: str, error: type[EmberError]
) -> None:
    if way == "short" and isinstance(subject.tier, FakeTier):
        subject.tier = guarded(subject.tier)  # the fake itself may break its word
    subject.spoil(way)
    with pytest.raises(error) as caught:
        await all_of(subject.tier.read(subject.blob, Extent(100, 50_000), demand=True))
    assert not isinstance(caught.value, NotFoundError) or way == "missing"
    assert isinstance(caught.value, RangeUnsupportedError) == (way == "rangeless")
    assert subject.open_reads() == 0


async def test_without_ranges_the_whole_can_still_be_had(subject: Subject) -> None:
    subject.spoil("rangeless")
    assert await all_of(subject.tier.stream(subject.blob, demand=True)) == DATA


async def test_a_read_may_be_left_in_the_middle(subject: Subject) -> None:
    for _ in range(3):
        async with aclosing(
            subject.tier.read(subject.blob, Extent(0, 150_000), demand=True)
        ) as pieces:
            assert await anext(pieces)
    assert subject.open_reads() == 0
    subject.tier.suspect(subject.blob)
    assert await all_of(subject.tier.read(subject.blob, Extent(5, 5), demand=True)) == DATA[5:10]


@pytest.mark.parametrize("way", ["short", "long", "hang"])
async def test_the_guards_hold_a_tier_to_its_word(way: str) -> None:
    async with guarded_fake() as subject:
        subject.spoil(way)
        for pieces in (
            subject.tier.read(subject.blob, Extent(0, 9000), demand=True),
            subject.tier.stream(subject.blob, demand=True),
        ):
            with pytest.raises((CorruptError, UnavailableError)):
                await all_of(pieces)
        assert subject.open_reads() == 0
