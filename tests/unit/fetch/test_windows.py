"""Windows that are not here come by range beside the chunks, once and right, or are gone around."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import DeadlineError
from snapshotter.fetch import beginning
from snapshotter.fetch import windows as rules
from snapshotter.image.index import LayerIndex
from tests.fakes.hand_clock import HandClock
from tests.fakes.tier import FakeTier
from tests.unit.fetch.conftest import Bench, until
from tests.unit.fetch.forms import PLAIN
from tests.unit.image.layers import member, sha256

BLOB = member(PLAIN, memory_level=4)


class Scene:
    """A gzip layer of which the index is here and the windows file in a registry."""

    def __init__(self, bench: Bench, plain: bytes = PLAIN, blob: bytes = BLOB) -> None:
        self.bench = bench
        self.plain = plain
        self.view = bench.layers.add(plain, blob, bench.tiers)
        (self.path,) = bench.layers.directory.glob("*.win")
        self.data = self.path.read_bytes()
        self.path.unlink()
        self.digest = sha256(self.data)
        self.offer(*(tier.add("r/app", self.data, self.digest) for tier in bench.tiers[:1]))

    @property
    def index(self) -> LayerIndex:
        return self.bench.layers.sources[self.view][0].index

    def offer(self, *blobs: BlobRef) -> None:
        (source,) = self.bench.layers.sources[self.view]
        self.bench.layers.sources[self.view] = [replace(source, windows=blobs)]

    async def reads_right(self, offset: int, length: int = 4000, **how: Any) -> bool:
        got = await self.bench.read(self.view, offset, length, **how)
        return got == self.plain[offset : offset + length]

    def asked(self, digest: Digest, tier: FakeTier | None = None) -> list[Extent | None]:
        return [one.extent for one in (tier or self.bench.tier).asked if one.digest == digest]

    def window_of(self, offset: int) -> Extent:
        point = self.index.nearest_checkpoint(offset // 4096 * 4096)
        return Extent(point.window_offset, point.window_stored_bytes)


@pytest.fixture
def scene(bench: Bench) -> Scene:
    return Scene(bench)


async def test_only_the_window_of_the_chunk_is_fetched_and_kept(scene: Scene) -> None:
    assert len(scene.data) > 2 * rules.WHOLE_BYTES
    assert await scene.reads_right(300_000)
    window = scene.window_of(300_000)
    assert scene.asked(scene.digest) == [window]
    kept = scene.path.read_bytes()
    assert kept[window.offset : window.end] == scene.data[window.offset : window.end]
    assert kept.count(0) > len(kept) // 2
    (chunks,) = scene.asked(scene.index.layer)
    assert chunks is not None
    assert chunks.offset == scene.index.nearest_checkpoint(299_008).in_offset
    tally = scene.bench.road.tally(scene.view)
    assert tally.index_bytes == window.length
    assert tally.bytes_by_tier == {"fake": chunks.length}
    text = scene.bench.metrics.render().decode()
    line = f'ember_tier_bytes_total{{purpose="index",tier="fake"}} {window.length}.0'
    assert line in text


async def test_every_extent_reads_right_without_windows(scene: Scene) -> None:
    chance = random.Random(5)
    places = [(chance.randrange(len(PLAIN)), chance.randrange(1, 9000)) for _ in range(60)]
    assert all(await asyncio.gather(*(scene.reads_right(*place) for place in places)))
    await scene.bench.road.complete(scene.view)
    assert await scene.bench.read(scene.view, 0, len(PLAIN)) == PLAIN
    fetched = sum(extent.length for extent in scene.asked(scene.digest) if extent)
    assert fetched < 1.3 * len(scene.data)
    await until(lambda: scene.bench.tier.open_reads == 0)


async def test_window_and_chunk_are_asked_for_at_the_same_time(scene: Scene) -> None:
    scene.bench.tier.gate.clear()
    reading = asyncio.create_task(scene.reads_right(300_000))
    await until(lambda: scene.bench.tier.open_reads == 2)
    assert len(scene.asked(scene.digest)) == len(scene.asked(scene.index.layer)) == 1
    scene.bench.tier.gate.set()
    assert await reading


async def test_of_a_long_range_only_the_first_part_is_read_without_the_window(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "AHEAD_BYTES", 6000)
    scene.bench.tier.gate.clear()
    reading = asyncio.create_task(scene.reads_right(300_000, 60_000))
    await until(lambda: scene.bench.tier.open_reads == 2)
    scene.bench.tier.gate.set()
    assert await reading
    first, second = scene.asked(scene.index.layer)
    assert first is not None
    assert second is not None
    assert (first.length, second.offset) == (6000, first.end)


async def test_one_connection_is_enough(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class OneAtATime(FakeTier):
        connection = asyncio.Semaphore(1)

        async def _send(self, *what: Any) -> AsyncGenerator[bytes, None]:
            async with self.connection, aclosing(super()._send(*what)) as pieces:
                async for piece in pieces:
                    yield piece

    monkeypatch.setattr(beginning, "AHEAD_BYTES", 6000)
    bench.tiers[:] = [OneAtATime()]
    await bench.close()
    await bench.open()
    scene = Scene(bench)
    places = [(offset, 60_000) for offset in range(0, 400_000, 90_000)]
    assert all(await asyncio.gather(*(scene.reads_right(*place) for place in places)))


async def test_a_window_that_is_here_is_not_asked_for_again(scene: Scene) -> None:
    assert await scene.reads_right(300_000)
    index, pool = scene.index, scene.bench.road
    await pool.stop(scene.view)
    await scene.bench.store.drop(scene.view)
    assert await scene.reads_right(300_000)
    assert len(scene.asked(scene.digest)) == 1
    assert index.local_window(index.nearest_checkpoint(299_008)) is not None


async def test_a_torn_window_is_fetched_again(scene: Scene) -> None:
    torn = bytearray(scene.data)
    window = scene.window_of(300_000)
    torn[window.offset + window.length // 2 : window.end] = bytes(
        window.end - window.offset - window.length // 2
    )
    scene.path.write_bytes(torn)
    assert await scene.reads_right(300_000)
    assert scene.asked(scene.digest) == [window]
    assert scene.path.read_bytes() == scene.data


async def test_neighbours_that_are_wanted_at_once_come_in_one_range(scene: Scene) -> None:
    windows, (source,) = scene.bench.road._crew.windows, scene.bench.layers.sources[scene.view]
    ledger = scene.bench.road._ledger(scene.view)
    points = [scene.index.checkpoint(number) for number in (3, 5, 4, 15, 3)]
    got = await asyncio.gather(
        *(windows.have(source, point, ledger, demand=True) for point in points)
    )
    for point, stored in zip(points, got, strict=True):
        assert scene.index.is_window(point, stored)
    first, last = scene.index.checkpoint(3), scene.index.checkpoint(5)
    end = last.window_offset + last.window_stored_bytes
    far = scene.index.checkpoint(15)
    assert scene.asked(scene.digest) == [
        Extent(first.window_offset, end - first.window_offset),
        Extent(far.window_offset, far.window_stored_bytes),
    ]


async def test_what_a_range_on_its_way_has_is_not_asked_for_again(scene: Scene) -> None:
    scene.bench.tier.gate.clear()
    windows, (source,) = scene.bench.road._crew.windows, scene.bench.layers.sources[scene.view]
    ledger = scene.bench.road._ledger(scene.view)
    asks = [
        asyncio.create_task(
            windows.have(source, scene.index.checkpoint(number), ledger, demand=True)
        )
        for number in (3, 5)
    ]
    await until(lambda: scene.bench.tier.open_reads == 1)
    between = scene.index.checkpoint(4)
    asks.append(asyncio.create_task(windows.have(source, between, ledger, demand=True)))
    await asyncio.sleep(0)
    scene.bench.tier.gate.set()
    assert scene.index.is_window(between, (await asyncio.gather(*asks))[2])
    assert len(scene.asked(scene.digest)) == 1


async def test_a_small_windows_file_comes_whole(bench: Bench) -> None:
    plain = PLAIN[:60_000]
    scene = Scene(bench, plain, member(plain, memory_level=4))
    assert len(scene.data) <= rules.WHOLE_BYTES
    assert await scene.reads_right(20_000)
    assert await scene.reads_right(50_000)
    assert scene.asked(scene.digest) == [Extent(0, len(scene.data))]
    assert scene.path.read_bytes() == scene.data


async def test_nothing_runs_on_when_nobody_waits_any_more(scene: Scene) -> None:
    scene.bench.tier.gate.clear()
    reading = asyncio.create_task(scene.reads_right(300_000))
    await until(lambda: scene.bench.tier.open_reads == 2)
    reading.cancel()
    await asyncio.wait({reading})
    await until(lambda: scene.bench.tier.open_reads == 0)
    assert scene.bench.road._crew.windows._layers == {}
    scene.bench.tier.gate.set()
    assert await scene.reads_right(300_000)


async def test_who_joined_gets_it_when_the_first_goes(scene: Scene) -> None:
    scene.bench.tier.gate.clear()
    windows, (source,) = scene.bench.road._crew.windows, scene.bench.layers.sources[scene.view]
    ledger, point = scene.bench.road._ledger(scene.view), scene.index.checkpoint(7)
    first, second = (
        asyncio.create_task(windows.have(source, point, ledger, demand=True)) for _ in range(2)
    )
    await until(lambda: scene.bench.tier.open_reads == 1)
    first.cancel()
    scene.bench.tier.gate.set()
    assert scene.index.is_window(point, await second)
    assert len(scene.asked(scene.digest)) == 1


async def test_without_the_blob_the_nearest_place_before_is_used_and_named(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert await scene.reads_right(200_000)
    del scene.bench.tier.blobs[scene.digest]
    with caplog.at_level(logging.ERROR):
        assert await scene.reads_right(300_000)
    near, wanted = scene.index.nearest_checkpoint(196_608), scene.index.nearest_checkpoint(299_008)
    assert f"from compressed byte {near.in_offset} on instead of {wanted.in_offset}" in caplog.text
    assert "no such blob" in caplog.text
    asked = len(scene.asked(scene.digest))
    assert await scene.reads_right(390_000)
    assert len(scene.asked(scene.digest)) == asked  # for a while nobody is asked again
    assert caplog.text.count("instead of") == 1  # nor told


async def test_a_blob_of_another_length_is_not_asked_for(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.offer(BlobRef("r/app", scene.digest, len(scene.data) - 1))
    assert await scene.reads_right(300_000)
    assert scene.asked(scene.digest) == []
    assert "not the windows'" in caplog.text


@pytest.mark.parametrize("way", ["flipped", "short", "long", "refused range"])
async def test_a_range_that_lies_is_asked_for_elsewhere(bench: Bench, way: str) -> None:
    scene = Scene(bench)
    liar = FakeTier("liar", piece_bytes=1 << 20)
    blob = liar.add("r/app", scene.data, scene.digest)
    liar.always = way
    bench.tiers[:] = [liar, bench.tier]
    await bench.close()
    await bench.open()
    scene.offer(blob)
    assert await scene.reads_right(300_000)
    assert len(scene.asked(scene.digest, liar)) == len(scene.asked(scene.digest)) == 1


async def test_where_all_lie_one_goes_without(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.bench.tier.blobs[scene.digest] = bytes(len(scene.data))
    assert await scene.reads_right(300_000)
    assert "are not those of the index" in caplog.text
    assert scene.digest in scene.bench.tier.suspected
    assert not scene.path.exists()


@pytest.mark.parametrize("way", ["unauthorized", "unavailable", "busy", "broken"])
async def test_a_passing_failure_is_waited_out(
    scene: Scene, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = scene.bench.tier
    tier.retry_after_s = 0.001
    tier.script = [way, way]  # of the chunks, and of their window
    with caplog.at_level(logging.ERROR):
        assert await scene.reads_right(300_000)
    assert "instead of" not in caplog.text
    assert len(scene.asked(scene.digest)) == 2


async def test_a_failure_that_does_not_pass_is_gone_around(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    class OnlyChunks(FakeTier):
        def _way(self) -> str:
            return "unauthorized" if self.asked[-1].digest == scene.digest else ""

    tier = OnlyChunks()
    tier.blobs = scene.bench.tier.blobs
    scene.bench.tiers[:] = [tier]
    await scene.bench.close()
    await scene.bench.open()
    assert await scene.reads_right(300_000)
    assert f"who are you ({rules.MOST_FAILURES} times in a row)" in caplog.text
    assert len(scene.asked(scene.digest, tier)) == rules.MOST_FAILURES


async def test_it_is_tried_again_after_a_while(bench: Bench) -> None:
    clock = HandClock()
    await bench.close()
    await bench.open(clock=clock)
    scene = Scene(bench)
    bench.tier.blobs.pop(scene.digest)
    assert await scene.reads_right(100_000)
    bench.tier.blobs[scene.digest] = scene.data
    assert await scene.reads_right(200_000)
    assert len(scene.asked(scene.digest)) == 1
    await clock.advance(rules.GIVEN_UP_S + 1)
    assert await scene.reads_right(390_000)
    assert len(scene.asked(scene.digest)) == 2


async def test_with_no_room_windows_stay_in_memory_within_bounds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rules, "REMEMBERED_BYTES", 40_000)
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(".win"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    for offset in (300_000, 100_000, 380_000, 30_000, 200_000):
        assert await scene.reads_right(offset)
    windows = scene.bench.road._crew.windows
    assert 0 < windows._remembered_bytes <= 40_000
    assert sum(map(len, windows._remembered.values())) == windows._remembered_bytes
    assert caplog.text.count("no room for the windows") == 1
    await scene.bench.road.stop(scene.view)
    await scene.bench.store.drop(scene.view)
    asked = len(scene.asked(scene.digest))
    assert await scene.reads_right(200_000)
    assert len(scene.asked(scene.digest)) == asked


async def test_a_window_that_hangs_fails_the_read_in_its_time(bench: Bench) -> None:
    await bench.close()
    await bench.open(stall_s=0.05)
    scene = Scene(bench)
    bench.tier.always = "hang"
    with pytest.raises(DeadlineError, match="sent nothing"):
        await scene.reads_right(300_000, deadline_s=0.5)
    await until(lambda: bench.tier.open_reads == 0)
