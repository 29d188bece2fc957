"""Layers that containerd has unpacked are indexed from its store: when idle, and never fetched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import NoSpaceError, NotFoundError, UnavailableError
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.idle_index import (
    FAULT_RETRY_S,
    POLL_S,
    PULL_LIMIT_S,
    RETRY_S,
    IdleIndexer,
)
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.ingest_job import Job
from snapshotter.imagefs.rates import Rates
from snapshotter.imagefs.shelf import Shelf
from tests.cases.tars import file, layer
from tests.fakes.hand_clock import HandClock
from tests.fakes.lazy import digest
from tests.fakes.registry import sha256
from tests.unit.imagefs.parts import Staged


def layer_of(plain: bytes) -> Layer:
    return Layer(sha256(plain), sha256(plain), sha256(plain), len(plain))


class Scene:
    """An indexer over a content store that is a dictionary; what goes to a registry fails."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.stored: dict[Digest, bytes] = {}
        self.read: list[Digest] = []
        self.received: list[int] = []
        self.full = False
        self.broken: set[Digest] = set()
        self.gate = asyncio.Event()
        self.clock = HandClock()
        self.shelf = Shelf(directory, lambda view: (), lambda blob: ())
        self.refused: list[Digest] = []
        self.ingest = Ingest(
            self,
            self.stage,
            directory,
            self.refuse,
            pool,
            self.clock,
            parallel=2,
            rates=Rates(1000, self.clock),
            received=self.received.append,
        )
        self.left: list[tuple[str, Layer]] = []
        self.down = False
        self.idle = IdleIndexer(self, self.ingest, self.shelf, self.clock, lambda: self.left)

    async def stage(self, view: Digest, at_least_bytes: int) -> Staged:
        return Staged()

    async def refuse(self, blob: Digest, diff_id: Digest, reason: str) -> None:
        self.refused.append(blob)

    async def stream(self, blob: BlobRef) -> AsyncIterator[bytes]:
        await self.gate.wait()
        raise NotFoundError(f"{blob} is not to be fetched")
        yield b""

    def suspect(self, blob: BlobRef) -> None:
        raise AssertionError(f"{blob} is not to be fetched")

    async def namespaces(self) -> list[str]:
        if self.down:
            raise UnavailableError("containerd does not answer")
        return ["default", "k8s.io"]

    async def blob_size(self, namespace: str, digest: Digest) -> int:
        if digest in self.broken:
            raise ValueError("surprise")
        if digest not in self.stored:
            raise NotFoundError(f"{digest} is not in {namespace}")
        return len(self.stored[digest])

    async def stream_blob(self, namespace: str, digest: Digest) -> AsyncIterator[bytes]:
        self.read.append(digest)
        if self.full:
            raise NoSpaceError("the disk is full")
        yield self.stored[digest]

    def want(self, *layers: Layer) -> None:
        image = ImageDocument(digest("manifest"), "r.example/a:1", "r.example/a", layers)
        self.idle.want("default", image, layers)

    async def poll(self, times: int = 1) -> None:
        """Let ``times`` polls pass, and the work that each of them begins."""
        for _ in range(times):
            await self.clock.advance(POLL_S)
            if self.gate.is_set():
                await self.settled()
            await asyncio.sleep(0)

    async def settled(self) -> None:
        """Until no job is under way."""
        await asyncio.gather(*(job.finished.wait() for job in self.ingest.jobs()))
        await asyncio.sleep(0)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    with _pool() as pool:
        made = Scene(tmp_path, pool)
        made.gate.set()
        made.idle.start()
        yield made
        await made.idle.stop()
        await made.ingest.close()


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def test_each_layer_is_read_once_and_indexed_when_containerd_has_it(scene: Scene) -> None:
    plains = [layer(file(b"one", b"1")), layer(file(b"two", b"2" * 5000))]
    one, two = map(layer_of, plains)
    scene.want(one, two)
    await asyncio.sleep(0)
    await scene.poll(2)
    assert scene.read == []
    scene.stored[two.blob] = plains[1]
    await scene.poll(2)
    assert scene.shelf.get(two.blob) is not None
    scene.stored[one.blob] = plains[0]
    scene.want(one, two)
    await scene.poll(4)
    assert scene.shelf.get(one.blob) is not None
    assert scene.read == [two.blob, one.blob]
    assert scene.received == []


async def test_it_waits_while_first_pulls_go_on(scene: Scene) -> None:
    plain = layer(file(b"one", b"1"))
    scene.stored[sha256(plain)] = plain
    scene.gate.clear()
    scene.ingest.start(BlobRef("r.example/b", digest("other"), 10), digest("plain other"))
    scene.want(layer_of(plain))
    await asyncio.sleep(0)
    await scene.poll(5)
    assert scene.read == []
    scene.gate.set()
    await scene.settled()
    await scene.poll(2)
    assert scene.read == [sha256(plain)]


async def test_a_layer_that_is_not_indexed_in_time_is_wanted_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def not_in_time(job: Job, wait_s: float) -> bool:
        return False

    plain = layer(file(b"one", b"1"))
    scene.stored[sha256(plain)] = plain
    scene.full = True
    with monkeypatch.context() as patched:
        patched.setattr(scene.ingest, "wait", not_in_time)
        scene.want(layer_of(plain))
        await asyncio.sleep(0)
        await scene.poll(2)
    assert f"{sha256(plain)} is not indexed after" in caplog.text
    scene.full = False
    await scene.poll(int(RETRY_S / POLL_S) + 2)
    assert scene.shelf.get(sha256(plain)) is not None


async def test_what_is_refused_or_never_comes_does_not_stop_the_others(scene: Scene) -> None:
    bad, good, never = b"no tar" * 100, layer(file(b"f", b"x")), layer_of(b"never there")
    scene.want(layer_of(bad), never, layer_of(good))
    scene.stored |= {sha256(bad): bad, sha256(good): good}
    await asyncio.sleep(0)
    await scene.poll(3)
    assert scene.refused == [sha256(bad)]
    assert scene.shelf.get(sha256(good)) is not None
    await scene.clock.advance(PULL_LIMIT_S)
    await scene.poll(1)
    assert scene.clock.sleepers == 0, "it still polls for a layer that nobody pulls any more"


async def test_a_full_disk_is_tried_again_until_it_has_room_also_long_after_the_pull(
    scene: Scene,
) -> None:
    plain = layer(file(b"one", b"1"))
    one = layer_of(plain)
    scene.stored[one.blob] = plain
    scene.full = True
    scene.want(one)
    await asyncio.sleep(0)
    for _ in range(5):
        await scene.clock.advance(PULL_LIMIT_S / 2)
        await scene.settled()
    assert len(scene.read) > 3
    scene.full = False
    await scene.poll(int(RETRY_S / POLL_S) + 2)
    assert scene.shelf.get(one.blob) is not None


async def test_a_surprise_at_one_layer_keeps_none_of_the_others_from_their_turn(
    scene: Scene,
) -> None:
    plains = [layer(file(b"one", b"1")), layer(file(b"two", b"2"))]
    one, two = map(layer_of, plains)
    scene.stored = {one.blob: plains[0], two.blob: plains[1]}
    scene.broken = {one.blob}
    scene.want(one, two)
    await asyncio.sleep(0)
    await scene.poll(2)
    assert scene.shelf.get(two.blob) is not None
    scene.broken.clear()
    await scene.poll(int(FAULT_RETRY_S / POLL_S) + 2)
    assert scene.shelf.get(one.blob) is not None


async def test_what_an_earlier_daemon_did_not_come_to_is_taken_up(scene: Scene) -> None:
    plains = [layer(file(b"one", b"1")), layer(file(b"two", b"2" * 5000))]
    here, thrown_away = map(layer_of, plains)
    scene.stored[here.blob] = plains[0]
    await scene.idle.stop()
    scene.left = [("r.example/a", here), ("r.example/a", thrown_away)]
    scene.down = True
    scene.idle.start()
    await asyncio.sleep(0)
    await scene.poll(3)
    assert scene.read == []
    scene.down = False
    for _ in range(100):
        if scene.read:
            break
        await scene.poll()
        await asyncio.to_thread(int)  # a thread looks which indexes are here
    await scene.settled()
    assert scene.read == [here.blob]
    assert scene.shelf.get(here.blob) is not None
