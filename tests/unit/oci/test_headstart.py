"""Several ways to one thing: who is waited for, who is asked beside, what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from snapshotter.errors import EmberError, NotFoundError, UnavailableError
from snapshotter.oci.headstart import first_success
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import parse_reference
from tests.fakes.clients import registry_client
from tests.fakes.images import push_image
from tests.fakes.registry import FakeRegistry, cut, sha256
from tests.unit.oci.test_registry_client_mirrors import two_hosts

HEAD_START_S = 0.05
AMD64 = Platform("linux", "amd64")
LAYER = b"a layer" * 100
Way = Callable[[], Awaitable[str]]


class Ways:
    """Ways that do as they are told, and what became of them."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.cancelled: list[str] = []
        self.failures: list[tuple[int, str]] = []
        self.second = asyncio.Event()
        """The second way has begun."""
        self.never = asyncio.Event()

    def way(
        self, name: str, after: asyncio.Event | None = None, error: Exception | None = None
    ) -> Way:
        async def run() -> str:
            self.began.append(name)
            if len(self.began) == 2:
                self.second.set()
            try:
                if after is not None:
                    await after.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if error is not None:
                raise error
            return name

        return run

    async def first(self, *ways: Way, head_start_s: float = HEAD_START_S) -> list[str]:
        def failed(number: int, error: EmberError) -> None:
            self.failures.append((number, str(error)))

        async with asyncio.timeout(5):
            return await first_success(ways, failed, head_start_s)


@pytest.fixture
async def ways() -> Ways:
    return Ways()


async def test_a_quick_way_is_the_only_one(ways: Ways) -> None:
    assert await ways.first(ways.way("a"), ways.way("b")) == ["a"]
    assert ways.began == ["a"]


async def test_a_way_that_fails_is_followed_at_once(ways: Ways) -> None:
    fails = ways.way("a", error=NotFoundError("no"))
    assert await ways.first(fails, ways.way("b"), head_start_s=60) == ["b"]
    assert ways.failures == [(0, "no")]


async def test_a_silent_way_does_not_hold_up_the_next_and_is_ended(ways: Ways) -> None:
    assert await ways.first(ways.way("a", ways.never), ways.way("b")) == ["b"]
    assert ways.cancelled == ["a"]
    assert ways.failures == []


async def test_a_slow_way_wins_if_the_next_one_is_slower(ways: Ways) -> None:
    assert await ways.first(ways.way("a", ways.second), ways.way("b", ways.never)) == ["a"]
    assert ways.cancelled == ["b"]


async def test_a_slow_way_is_waited_for_if_the_next_one_fails(ways: Ways) -> None:
    slow = ways.way("a", ways.second)
    assert await ways.first(slow, ways.way("b", error=UnavailableError("down"))) == ["a"]


async def test_nothing_comes_of_ways_that_all_fail(ways: Ways) -> None:
    slow = ways.way("a", ways.second, NotFoundError("not a"))
    assert await ways.first(slow, ways.way("b", error=NotFoundError("not b"))) == []
    assert sorted(ways.failures) == [(0, "not a"), (1, "not b")]
    assert await ways.first() == []


async def test_an_error_that_nobody_expects_ends_it(ways: Ways) -> None:
    with pytest.raises(ZeroDivisionError):
        await ways.first(ways.way("a", ways.never), ways.way("b", error=ZeroDivisionError()))
    assert ways.cancelled == ["a"]


async def test_who_is_cancelled_leaves_nothing_running(ways: Ways) -> None:
    task = asyncio.create_task(ways.first(ways.way("a", ways.never), ways.way("b", ways.never)))
    await asyncio.wait_for(ways.second.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ways.cancelled) == ["a", "b"]


async def test_an_image_is_resolved_behind_a_silent_mirror_while_a_decision_waits(
    tmp_path: Path,
) -> None:
    limits = TransportLimits(connect_s=10, idle_s=30)
    async with FakeRegistry() as registry, FakeRegistry() as mirror:
        push_image(registry, "team/app", [LAYER], tag="1")
        mirror.inject(cut(-1, "hang"))
        certs = two_hosts(tmp_path, mirror, registry)
        async with registry_client(certs=certs, limits=limits) as client, asyncio.timeout(5):
            reference = parse_reference(f"{registry.authority}/team/app:1")
            image = await client.resolve(reference, AMD64)
            assert image.layers[0].digest == sha256(LAYER)
        assert len(mirror.seen) == 2, "it is asked first each time: slow is not gone"
