"""A view that was stopped is let go of at once, however its fetches ended: no collector runs.

An index that stays open keeps its removed file on the disk. What failed or was cancelled knows
frames, and those know the index: none of it may be kept, and least of all by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.chunks.offload import offload
from snapshotter.config import parse
from snapshotter.content import Digest
from snapshotter.errors import EmberError, UnavailableError
from snapshotter.image.index import LayerIndex
from tests.fakes.gates import TokenGate
from tests.fakes.registry import FakeRegistry, answer_with, cut, flip, header
from tests.unit.fetch.conftest import Bench, until
from tests.unit.fetch.test_fairness import road_over
from tests.unit.image.layers import frames, member, text

PLAIN = text(200_123)
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda plain: plain,
    "gzip": lambda plain: member(plain, memory_level=1),
    "zstd frames": lambda plain: frames(plain, 30_000),
}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def index_of(bench: Bench, view: Digest) -> weakref.ref[LayerIndex]:
    return weakref.ref(bench.layers.sources[view][0].index)


async def let_go(bench: Bench, view: Digest) -> None:
    """What a removal does."""
    await bench.road.stop(view)
    await bench.store.drop(view)
    del bench.layers.sources[view]
    await asyncio.sleep(0)


async def served(bench: Bench, view: Digest) -> None:
    await bench.read(view, 0, 9000)


async def stopped(bench: Bench, view: Digest) -> None:
    bench.tier.gate.clear()
    reads = [asyncio.create_task(bench.read(view, at, 9000)) for at in (0, 50_000, 150_000)]
    await until(lambda: bench.tier.open_reads > 0)
    await bench.road.stop(view)
    ends = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(end, UnavailableError) for end in ends)


async def stopped_in_the_middle(bench: Bench, view: Digest) -> None:
    reading = asyncio.create_task(bench.road.complete(view))
    await until(lambda: bench.tier.sent_bytes > 10_000)
    await bench.road.stop(view)
    await asyncio.gather(reading, return_exceptions=True)


async def stopped_before_it_began(bench: Bench, view: Digest) -> None:
    reading = asyncio.create_task(bench.read(view, 0, 9000))
    await until(lambda: bench.store.get(view) is not None)
    await bench.road.stop(view)
    await asyncio.gather(reading, return_exceptions=True)


async def cancelled(bench: Bench, view: Digest) -> None:
    bench.tier.gate.clear()
    reading = asyncio.create_task(bench.read(view, 0, 9000))
    await until(lambda: bench.tier.open_reads > 0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def failed(bench: Bench, view: Digest) -> None:
    for way in ("unavailable", "missing", "busy", "flipped", "short", "long", "hang"):
        bench.tier.always = way
        with pytest.raises(UnavailableError):
            await bench.read(view, 0, len(PLAIN), deadline_s=0.02)


ENDINGS = {
    ending.__name__: ending
    for ending in (
        served,
        stopped,
        stopped_in_the_middle,
        stopped_before_it_began,
        cancelled,
        failed,
    )
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_index_is_let_go_of_however_its_fetches_ended(
    bench: Bench, ending: str, form: str
) -> None:
    view = bench.layers.add(PLAIN, FORMS[form](PLAIN), bench.tiers)
    index = index_of(bench, view)
    await ENDINGS[ending](bench, view)
    await let_go(bench, view)
    assert index() is None


FAULTS = {
    "500": answer_with(500),
    "404": answer_with(404),
    "429": answer_with(429, ("Retry-After", "1")),
    "no ranges": answer_with(400),
    "no answer": cut(-1),
    "a silent host": cut(-1, "hang"),
    "a body that stops": cut(1000, "hang"),
    "a reset": cut(1000, "reset"),
    "a lie about the range": header("Content-Range", "bytes 0-9/10"),
    "a flipped byte": flip(100),
    "a redirect to a dead host": answer_with(307, ("Location", "http://127.0.0.1:1/")),
}


@pytest.mark.parametrize("fault", [*FAULTS, "no token", "nobody listens"])
async def test_no_fault_of_a_registry_keeps_an_index_open(
    bench: Bench, tmp_path: Path, fault: str
) -> None:
    async with FakeRegistry() as registry:
        blob = member(PLAIN, memory_level=1)
        registry.add_blob("app", blob)
        where = f"{registry.authority}/app"
        view = bench.layers.add(PLAIN, blob, bench.tiers, where=where)
        index = index_of(bench, view)
        config = parse("[registry]\nread_timeout = 0.1\nconnect_timeout = 0.1\n", "test")
        async with road_over(bench, config, tmp_path):
            if fault == "no token":
                TokenGate(registry)
                registry.inject(answer_with(500), lambda seen: "token" in seen.path)
            elif fault == "nobody listens":
                await registry.stop()
            else:
                registry.inject(FAULTS[fault])
            with contextlib.suppress(EmberError):
                await bench.read(view, 100_000, 9000, deadline_s=0.3)
            await let_go(bench, view)
            assert index() is None


class Thing:
    """Something that a frame knows."""


async def test_work_that_failed_in_a_thread_is_let_go_of() -> None:
    async def fail() -> weakref.ref[Thing]:
        thing = Thing()
        with contextlib.suppress(UnavailableError):
            await offload(pool, broken, thing)
        return weakref.ref(thing)

    def broken(thing: Thing) -> None:
        raise UnavailableError(repr(thing))

    with ThreadPoolExecutor(1) as pool:
        found = await fail()
        await offload(pool, lambda: None)  # the pool's thread itself has let go, too
        assert found() is None
