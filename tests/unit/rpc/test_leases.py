"""Leases of pulls: ended with their pull, or later, and nobody else's ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from snapshotter.errors import UnavailableError
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.leases import OWNER, PullLeases
from snapshotter.rpc.pb.containerd.services.leases.v1 import leases_pb2
from snapshotter.rpc.pb.containerd.services.namespaces.v1 import namespace_pb2
from tests.fakes.skipping_clock import SkippingClock
from tests.fakes.upstream import Answer, Upstream, reply

SERVICE = "/containerd.services.leases.v1.Leases/"
NAMESPACES = "/containerd.services.namespaces.v1.Namespaces/List"


class Kept:
    """containerd's leases by namespace and id; ``refusing`` are the verbs that fail."""

    def __init__(self, upstream: Upstream) -> None:
        self.leases: dict[tuple[str, str], dict[str, str]] = {}
        self.refusing: set[str] = set()
        self.changed = asyncio.Event()
        self.creating, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        for verb, work in (
            ("Create", self._create),
            ("Delete", self._delete),
            ("List", self._list),
        ):
            upstream.answers[SERVICE + verb] = self._answer(verb, work)
        spaces = [namespace_pb2.Namespace(name=name) for name in ("default", "k8s.io")]
        answer = namespace_pb2.ListNamespacesResponse(namespaces=spaces)
        upstream.answers[NAMESPACES] = reply(answer.SerializeToString())

    def add(self, name: str, owner: str | None, namespace: str = "default") -> None:
        self.leases[namespace, name] = {} if owner is None else {OWNER: owner}

    async def left(self, *names: str) -> bool:
        """Wait until these are left and no other."""
        try:
            async with asyncio.timeout(10):
                while sorted(name for _, name in self.leases) != sorted(names):
                    await self.changed.wait()
                    self.changed.clear()
        except TimeoutError:
            return False
        return True

    def _answer(self, verb: str, work: Any) -> Answer:
        async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
            namespace = dict(context.invocation_metadata())["containerd-namespace"]
            async for message in requests:
                if verb in self.refusing:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
                await context.write(await work(namespace, message, context))
                self.changed.set()

        return answer

    async def _create(self, namespace: str, message: bytes, context: Any) -> bytes:
        request = leases_pb2.CreateRequest.FromString(message)
        self.creating.set()
        await self.gate.wait()
        self.leases[namespace, request.id] = dict(request.labels)
        return b""

    async def _delete(self, namespace: str, message: bytes, context: Any) -> bytes:
        request = leases_pb2.DeleteRequest.FromString(message)
        if self.leases.pop((namespace, request.id), None) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        return b""

    async def _list(self, namespace: str, message: bytes, context: Any) -> bytes:
        (wanted,) = leases_pb2.ListRequest.FromString(message).filters
        found = [
            leases_pb2.Lease(id=name, labels=labels)
            for (space, name), labels in self.leases.items()
            if space == namespace and f'labels."{OWNER}"=="{labels.get(OWNER)}"' == wanted
        ]
        answer: bytes = leases_pb2.ListResponse(leases=found).SerializeToString()
        return answer


@pytest.fixture
async def leases(tmp_path: Path) -> AsyncIterator[PullLeases]:
    containerd = Containerd(tmp_path / "containerd.sock", 5)
    made = PullLeases(containerd, "this cache", SkippingClock())
    yield made
    await made.stop()
    await containerd.close()


async def test_what_dead_daemons_left_is_ended_in_every_namespace_and_nothing_else(
    leases: PullLeases, tmp_path: Path
) -> None:
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        kept = Kept(upstream)
        kept.add("ember-pull-1", "this cache")
        kept.add("ember-pull-2", "this cache", "k8s.io")
        kept.add("ember-pull-3", "another cache")
        kept.add("somebody-s", None)
        async with leases.hold("default") as living:
            leases.start()
            assert await kept.left("ember-pull-3", "somebody-s", living)
        assert await kept.left("ember-pull-3", "somebody-s")


async def test_leftovers_are_ended_when_containerd_comes(
    leases: PullLeases, tmp_path: Path
) -> None:
    leases.start()
    await asyncio.sleep(0)
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        kept = Kept(upstream)
        kept.add("ember-pull-1", "this cache")
        assert await kept.left()


@pytest.mark.parametrize("verb", ["List", "Delete"])
async def test_a_containerd_that_fails_is_asked_again_with_growing_pauses(
    tmp_path: Path, verb: str
) -> None:
    clock = SkippingClock()
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        kept = Kept(upstream)
        kept.add("ember-pull-1", "this cache")
        kept.refusing = {verb}
        containerd = Containerd(upstream.path, 5)
        leases = PullLeases(containerd, "this cache", clock)
        leases.start()
        async with asyncio.timeout(10):
            while len(clock.slept) < 8:
                await upstream.arrived.wait()
                upstream.arrived.clear()
        kept.refusing.clear()
        assert await kept.left()
        assert clock.slept[:8] == [1, 2, 4, 8, 16, 30, 30, 30]
        await leases.stop()
        await containerd.close()


async def test_a_lease_that_could_not_be_ended_with_its_pull_is_ended_later(
    leases: PullLeases, tmp_path: Path
) -> None:
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        kept = Kept(upstream)
        leases.start()
        async with leases.hold("k8s.io"):
            kept.refusing = {"Delete"}
        assert len(kept.leases) == 1
        kept.refusing.clear()
        assert await kept.left()


async def test_a_pull_that_is_cancelled_ends_its_lease(leases: PullLeases, tmp_path: Path) -> None:
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        kept, held = Kept(upstream), asyncio.Event()

        async def pull() -> None:
            async with leases.hold("default"):
                held.set()
                await asyncio.Event().wait()

        pulling = asyncio.create_task(pull())
        await held.wait()
        assert len(kept.leases) == 1
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)
        assert await kept.left()


async def test_a_pull_that_is_cancelled_while_its_lease_is_made_leaves_none(
    leases: PullLeases, tmp_path: Path
) -> None:
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        kept = Kept(upstream)
        kept.gate.clear()

        async def pull() -> None:
            async with leases.hold("default"):
                raise AssertionError("it was cancelled before")

        pulling = asyncio.create_task(pull())
        await asyncio.wait_for(kept.creating.wait(), 10)
        pulling.cancel()
        await asyncio.sleep(0)
        kept.gate.set()
        await asyncio.gather(pulling, return_exceptions=True)
        assert kept.changed.is_set()
        assert kept.leases == {}


async def test_without_containerd_a_pull_fails_and_says_so(leases: PullLeases) -> None:
    with pytest.raises(UnavailableError, match="lease ember-pull-"):
        async with leases.hold("default"):
            raise AssertionError("there is nothing that holds")
