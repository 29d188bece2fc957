"""First pulls: a layer is readable only when both digests were right, whoever asked."""

from __future__ import annotations

import asyncio
import errno
import gc
import gzip
import logging
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.errors import (
    CorruptError,
    EmberError,
    LengthError,
    NoSpaceError,
    RefusedError,
    UnavailableError,
)
from tests.unit.fetch.conftest import until
from tests.unit.imagefs.first_pulls import PLAIN, Scene, plain_layer, sha256


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def scene(tmp_path: Path, pool: ThreadPoolExecutor) -> Scene:
    return Scene(tmp_path, pool)


async def test_a_layer_whose_digests_are_right_is_sealed_and_indexed(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    job = scene.ingest.start(blob, sha256(PLAIN))
    assert await scene.ingest.wait(job, 30)
    assert scene.staged[0].sealed is not None
    assert bytes(scene.staged[0].data) == PLAIN
    assert scene.has_index(blob)
    assert job.percent == 100


async def test_those_who_ask_for_one_layer_at_once_share_one_stream(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    jobs = [scene.ingest.start(blob, sha256(PLAIN)) for _ in range(20)]
    await asyncio.gather(*(scene.ingest.wait(job, 30) for job in jobs))
    assert scene.opened == 1


async def test_a_blob_that_lies_about_its_digest_is_never_shown_and_may_be_tried_again(
    scene: Scene,
) -> None:
    blob = scene.add(gzip.compress(PLAIN), named=b"something else")
    job = scene.ingest.start(blob, sha256(PLAIN))
    with pytest.raises(CorruptError, match=blob.digest.hex[:12]):
        await scene.ingest.wait(job, 30)
    assert scene.staged[0].sealed is None
    assert scene.staged[0].discarded
    assert scene.refused == []
    assert scene.suspected
    assert scene.ingest.start(blob, sha256(PLAIN)) is not job


async def test_a_layer_that_is_not_what_the_config_promises_is_refused_for_good(
    scene: Scene,
) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    job = scene.ingest.start(blob, sha256(b"another tar"))
    with pytest.raises(EmberError):
        await scene.ingest.wait(job, 30)
    assert scene.staged[0].sealed is None
    assert scene.staged[0].discarded


async def test_a_hostile_tar_is_refused_by_name_and_remembered(scene: Scene) -> None:
    hostile = plain_layer(b"x", name="../../etc/passwd")
    blob = scene.add(gzip.compress(hostile))
    job = scene.ingest.start(blob, sha256(hostile))
    with pytest.raises(RefusedError, match="etc/passwd"):
        await scene.ingest.wait(job, 30)
    assert scene.refused[0][0] == blob.digest
    assert scene.staged[0].discarded


async def test_a_stream_that_breaks_leaves_nothing_and_the_next_one_may_succeed(
    scene: Scene,
) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.error = UnavailableError("the registry went away")
    job = scene.ingest.start(blob, sha256(PLAIN))
    with pytest.raises(UnavailableError):
        await scene.ingest.wait(job, 30)
    assert all(staged.discarded for staged in scene.staged)
    scene.error = None
    assert await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)
    assert scene.staged[-1].sealed is not None


async def test_waiting_ends_at_its_limit_and_the_work_goes_on(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.gate.clear()
    job = scene.ingest.start(blob, sha256(PLAIN))
    assert not await scene.ingest.wait(job, 0.05)
    assert scene.ingest.running(blob.digest, sha256(PLAIN))
    scene.gate.set()
    assert await scene.ingest.wait(job, 30)


async def test_a_layer_that_cannot_fit_is_not_asked_for(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.room_bytes = blob.size_bytes - 1
    with pytest.raises(NoSpaceError):
        await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)
    assert scene.opened == 0
    scene.room_bytes += 1
    assert await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpaceError), (errno.EIO, UnavailableError)]
)
async def test_a_fault_of_the_disk_is_called_what_it_is(
    scene: Scene, number: int, kind: type[EmberError]
) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.disk_fault = OSError(number, "the disk says so")
    with pytest.raises(kind, match="the disk says so"):
        await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)
    scene.disk_fault = None
    assert await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)


async def test_no_more_layers_are_streamed_at_once_than_allowed(scene: Scene) -> None:
    plains = [plain_layer(bytes([n]) * 1000) for n in range(5)]
    scene.gate.clear()
    jobs = [scene.ingest.start(scene.add(gzip.compress(p)), sha256(p)) for p in plains]
    for _ in range(10):
        await asyncio.sleep(0)
    assert scene.opened == 2
    scene.gate.set()
    await asyncio.gather(*(scene.ingest.wait(job, 30) for job in jobs))
    assert scene.opened == 5


async def test_closing_stops_a_stream_in_the_middle_and_leaves_nothing(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.gate.clear()
    job = scene.ingest.start(blob, sha256(PLAIN))
    for _ in range(10):
        await asyncio.sleep(0)
    await scene.ingest.close()
    assert job.finished.is_set()
    assert scene.staged[0].discarded
    assert scene.staged[0].sealed is None


async def test_closing_tells_everybody_who_waits_and_takes_nothing_more(scene: Scene) -> None:
    plains = [plain_layer(bytes([n]) * 1000) for n in range(5)]
    blobs = [scene.add(gzip.compress(plain)) for plain in plains]
    scene.gate.clear()
    jobs = [scene.ingest.start(b, sha256(p)) for b, p in zip(blobs, plains, strict=True)]
    waits = [asyncio.create_task(scene.ingest.wait(job, 1000)) for job in jobs]
    await scene.ingest.close()  # some have a slot, some wait for one, none has begun to run
    for wait in waits:
        with pytest.raises(UnavailableError, match="stopping; ask again"):
            await wait
    with pytest.raises(UnavailableError, match="stopping; ask again"):
        scene.ingest.start(blobs[0], sha256(plains[0]))


async def test_what_ends_in_the_middle_leaves_no_file_and_no_thread(
    scene: Scene, tmp_path: Path
) -> None:
    noise = plain_layer(random.Random(1).randbytes(4_000_000))
    blob = scene.add(gzip.compress(noise, 1))
    scene.error = UnavailableError("gone in the middle")
    job = scene.ingest.start(blob, sha256(noise))
    with pytest.raises(UnavailableError, match="gone"):
        await scene.ingest.wait(job, 30)
    assert list(tmp_path.iterdir()) == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("ember-index")] == []


async def test_indexing_what_is_here_already_keeps_no_view(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    job = scene.ingest.start_from(blob, sha256(PLAIN), scene.stream)
    assert await scene.ingest.wait(job, 30)
    assert scene.staged == []
    assert scene.has_index(blob)


async def test_a_fault_that_passes_is_not_seen_by_who_waits(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.error = UnavailableError("the registry went away")
    scene.faulty = 2
    job = scene.ingest.start(blob, sha256(PLAIN))
    assert await scene.ingest.wait(job, 30)
    assert scene.opened == 3
    assert sum(scene.received) == 3 * blob.size_bytes  # what failed came over the link too


async def test_what_is_streamed_for_its_index_alone_keeps_no_view(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    assert await scene.ingest.wait(scene.ingest.start_index(blob, sha256(PLAIN)), 30)
    assert scene.staged == []
    assert scene.has_index(blob)
    assert sum(scene.received) == blob.size_bytes


async def test_the_rate_of_a_registry_is_that_of_its_streams_together(scene: Scene) -> None:
    plains = [plain_layer(random.Random(n).randbytes(2_000_000)) for n in range(2)]
    scene.part_s = 0.1  # 100,000 bytes each
    jobs = [scene.ingest.start(scene.add(plain), sha256(plain)) for plain in plains]
    await asyncio.gather(*(scene.ingest.wait(job, 30) for job in jobs))
    assert scene.ingest.rate("r.example") == pytest.approx(1_000_000, rel=0.05)
    assert scene.ingest.rate("other.example") == 1000


async def test_what_will_be_so_again_is_not_asked_for_again(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.blobs[blob.digest] = b""
    scene.error = LengthError("it has another length there")
    with pytest.raises(LengthError):
        await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)
    assert (scene.opened, scene.clock.slept) == (1, [])
    assert scene.suspected == [blob]


async def test_a_stream_that_cannot_be_taken_up_where_it_broke_is_begun_anew(
    scene: Scene,
) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    scene.error, scene.faulty = LengthError("its rest: 206 without Content-Range"), 1
    assert await scene.ingest.wait(scene.ingest.start(blob, sha256(PLAIN)), 30)
    assert (scene.opened, scene.clock.slept) == (2, [])


async def test_a_lie_about_one_blob_does_not_hold_up_who_says_the_truth(scene: Scene) -> None:
    blob = scene.add(gzip.compress(PLAIN))
    lie = scene.ingest.start(blob, sha256(b"another tar"))
    truth = scene.ingest.start(blob, sha256(PLAIN))
    assert await scene.ingest.wait(truth, 30)
    with pytest.raises(EmberError):
        await scene.ingest.wait(lie, 30)


@pytest.mark.parametrize("how", ["broken", "stopped", "lying"])
async def test_a_stream_that_fails_leaves_no_thread_and_no_file(
    scene: Scene, tmp_path: Path, how: str
) -> None:
    blob = scene.add(gzip.compress(PLAIN), named=b"something else" if how == "lying" else None)
    scene.error = UnavailableError("the registry went away") if how == "broken" else None
    if how == "stopped":
        scene.gate.clear()
    job = scene.ingest.start(blob, sha256(PLAIN))
    if how == "stopped":
        assert not await scene.ingest.wait(job, 0.05)
        await scene.ingest.close()
    else:
        with pytest.raises(EmberError):
            await scene.ingest.wait(job, 30)
    assert list(tmp_path.iterdir()) == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("ember-index")] == []


@pytest.mark.parametrize("ends", ["by an error", "by a stop"])
async def test_a_first_pull_that_ends_half_way_leaves_no_file(
    scene: Scene, tmp_path: Path, ends: str
) -> None:
    plain = plain_layer(random.Random(3).randbytes(4_000_000))
    blob = scene.add(gzip.compress(plain, 1))
    scene.error = UnavailableError("reset") if ends == "by an error" else None
    job = scene.ingest.start(blob, sha256(plain))
    if ends == "by a stop":
        for _ in range(1_000_000):
            if job.done_bytes > 2_000_000:
                break
            await asyncio.sleep(0)
        await scene.ingest.close()
    with pytest.raises(UnavailableError):
        await scene.ingest.wait(job, 30)
    assert list(tmp_path.iterdir()) == []
    assert all(staged.discarded for staged in scene.staged)


@pytest.mark.parametrize("kind", [RefusedError, UnavailableError, None])
async def test_a_first_pull_that_failed_holds_nothing_but_its_reason(
    scene: Scene, pool: ThreadPoolExecutor, kind: type[EmberError] | None
) -> None:
    logging.disable()  # what is logged keeps its errors here
    gc.collect()
    gc.disable()
    try:
        plain = scene.add(gzip.compress(PLAIN))
        torn = scene.add(gzip.compress(PLAIN)[:-9] + bytes(9))
        scene.error = kind("as told") if kind is not None else None
        job = scene.ingest.start(torn if kind is None else plain, sha256(PLAIN))
        with pytest.raises(EmberError):
            await scene.ingest.wait(job, 30)
        pool.shutdown()  # its threads have let go of what they raised
        await asyncio.sleep(0)
        scene.error = None
        staged = [weakref.ref(each) for each in scene.staged]
        scene.staged.clear()
        assert staged
        assert [each() for each in staged] == [None] * len(staged)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


async def test_a_registry_that_hangs_holds_up_its_own_layers_only(scene: Scene) -> None:
    scene.gate.clear()
    plains = [plain_layer(b"x" * 1000, f"file{n}") for n in range(4)]
    hanging = [scene.ingest.start(scene.add(plain), sha256(plain)) for plain in plains[:3]]
    other = replace(scene.add(plains[3]), repository="other.example/app")
    scene.ingest.start(other, sha256(plains[3]))
    await until(lambda: scene.opened == 3)
    assert [job.quiet is not None for job in hanging] == [True, True, False]
    scene.gate.set()
    assert await scene.ingest.wait(hanging[2], 20)
