"""A registry that asks for quiet gets it, from all readers, for as long as it asked."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from snapshotter.content import Extent
from snapshotter.errors import BusyError, UnavailableError
from snapshotter.oci.credentials import Credential, MemoryCredentials
from snapshotter.oci.platform import Platform
from snapshotter.oci.ratelimit import RETRY_AFTER_LIMIT_S, CoolDowns, parse_retry_after
from snapshotter.oci.reference import parse_reference
from tests.fakes.clients import read, registry_client, registry_with
from tests.fakes.gates import BasicGate
from tests.fakes.images import push_image
from tests.fakes.registry import FakeRegistry, answer_with
from tests.fakes.skipping_clock import SkippingClock

DATA = b"0123456789" * 1000
PART = Extent(10, 10)
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        (None, None),
        ("", None),
        ("0", 0),
        (" 120 ", 120),
        ("999999999999999999", 999999999999),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("٣", None),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0),
        ("Fri, 01 Jan 2027 12:00:00 GMT", 365 * 86400),
        ("Thu, 99 Jan 2026 12:00:30 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str | None, wait_s: float | None) -> None:
    assert parse_retry_after(text, NOW) == wait_s


def test_without_a_time_the_delay_doubles_up_to_a_minute() -> None:
    clock = SkippingClock()
    cool_downs = CoolDowns(clock, seed=1)
    delays = []
    for _ in range(9):
        delays.append(cool_downs.note_busy("key", None))
        clock.now_s += delays[-1] + 0.01
    for number, delay_s in enumerate(delays):
        assert min(2**number, 60) / 2 <= delay_s <= min(2**number, 60)
    cool_downs.note_success("key")
    assert cool_downs.note_busy("key", None) <= 1


def test_a_success_from_before_does_not_end_a_cool_down() -> None:
    cool_downs = CoolDowns(SkippingClock(), seed=1)
    cool_downs.note_busy("key", 30)
    cool_downs.note_success("key")
    assert cool_downs.left_s("key") == 30
    cool_downs.note_busy("key", 5)
    assert cool_downs.left_s("key") == 30
    assert cool_downs.left_s("another") == 0


@pytest.mark.parametrize("asked_s", [RETRY_AFTER_LIMIT_S + 1, 365 * 86400, 999999999999])
def test_no_answer_keeps_readers_away_for_as_long_as_they_wait(asked_s: float) -> None:
    assert CoolDowns(SkippingClock()).note_busy("key", asked_s) == RETRY_AFTER_LIMIT_S
    assert CoolDowns(SkippingClock(), limit_s=3).note_busy("key", asked_s) == 3
    assert CoolDowns(SkippingClock(), limit_s=3).note_busy("key", 2) == 2


async def test_an_operator_may_ask_once_in_spite_of_it_and_an_answer_ends_it_for_all() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(429, ("Retry-After", "200")))
        for asked in (1, 2, 3):
            for _ in range(3):
                with pytest.raises(BusyError, match=r"\d\d:\d\d:\d\d UTC"):
                    await read(client, blob, PART)
                assert len(registry.seen) == asked
            client.insist()
        registry.heal()
        assert await read(client, blob, PART) == DATA[10:20]
        assert await read(client, blob, PART) == DATA[10:20]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_registry_is_asked_again_only_when_it_said(status: int) -> None:
    clock = SkippingClock()
    async with registry_with(DATA) as (registry, blob), registry_client(clock=clock) as client:
        registry.inject(answer_with(status, ("Retry-After", "20")), times=1)
        for _ in range(10):
            with pytest.raises(BusyError) as caught:
                await read(client, blob, PART)
            assert caught.value.retry_after_s == 20
        assert len(registry.seen) == 1
        clock.now_s += 20
        assert await read(client, blob, PART) == DATA[10:20]


async def test_the_registry_s_own_clock_counts_for_its_dates() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        then, now = "Thu, 01 Jan 1998 00:00:40 GMT", "Thu, 01 Jan 1998 00:00:00 GMT"
        registry.inject(answer_with(429, ("Retry-After", then), ("Date", now)))
        with pytest.raises(BusyError) as caught:
            await read(client, blob, PART)
        assert caught.value.retry_after_s == 40


async def test_429_without_a_time_backs_off_by_itself() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(429))
        for _ in range(10):
            with pytest.raises(BusyError) as caught:
                await read(client, blob, PART)
            assert caught.value.retry_after_s is not None
        assert len(registry.seen) == 1


async def test_503_without_a_time_is_plain_unavailability() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(503), times=1)
        with pytest.raises(UnavailableError) as caught:
            await read(client, blob, PART)
        assert not isinstance(caught.value, BusyError)
        assert await read(client, blob, PART) == DATA[10:20]


async def test_a_credential_that_used_its_share_up_leaves_the_others_alone() -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry():
        pulls = MemoryCredentials()
        pulls.put(blob.repository, Credential("busy", "word"))
        registry.gate = BasicGate({"busy": "word", "idle": "word"})
        registry.inject(
            answer_with(429, ("Retry-After", "60")),
            lambda seen: seen.headers.get("authorization", "").startswith("Basic YnVzeTp3"),
        )
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(BusyError):
                await read(client, blob, PART)
            pulls.forget(blob.repository)
            pulls.put(blob.repository, Credential("idle", "word"))
            assert await read(client, blob, PART) == DATA[10:20]


async def test_a_busy_mirror_is_passed_over_meanwhile(tmp_path: Path) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        folder = tmp_path / registry.authority
        folder.mkdir()
        (folder / "hosts.toml").write_text(f'server = "{registry.url}"\n[host."{mirror.url}"]\n')
        mirror.inject(answer_with(429, ("Retry-After", "60")))
        async with registry_client(certs=tmp_path) as client:
            for _ in range(5):
                assert await read(client, blob, PART) == DATA[10:20]
        assert len(mirror.seen) == 1


async def test_a_short_quiet_is_waited_out_while_resolving_and_a_long_one_told() -> None:
    clock = SkippingClock()
    async with FakeRegistry() as registry, registry_client(clock=clock) as client:
        push_image(registry, "app", [DATA])
        reference = parse_reference(f"{registry.authority}/app")
        registry.inject(answer_with(429, ("Retry-After", "2")), times=1)
        await client.resolve(reference, Platform("linux", "amd64"))
        assert clock.slept == [2]
        registry.inject(answer_with(429, ("Retry-After", "600")))
        with pytest.raises(BusyError):
            await client.resolve(reference, Platform("linux", "amd64"))


async def test_a_thousand_readers_make_no_storm() -> None:
    async with registry_with(DATA) as (registry, blob), registry_client() as client:
        registry.inject(answer_with(429, ("Retry-After", "20")))
        with pytest.raises(BusyError):
            await read(client, blob, PART)
        results = await asyncio.gather(
            *(read(client, blob, PART) for _ in range(1000)), return_exceptions=True
        )
        assert all(isinstance(result, BusyError) for result in results)
        assert len(registry.seen) == 1
