"""Whatever dies when, a chunk that is called readable is right, and one called durable stays."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine
from snapshotter.chunks.datafile import ClosedError
from snapshotter.chunks.view import View
from snapshotter.content import Extent
from snapshotter.errors import UnavailableError
from tests.fakes.engine import FaultyEngine
from tests.unit.chunks.conftest import BOOT, CHUNK, NEXT_BOOT, VIEW, Content, Stores

WRITER = """
import asyncio, random, sys
from pathlib import Path
from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine
from tests.unit.chunks.conftest import VIEW, Content, Stores

async def main(root, seed):
    content, chance = Content(200 * 4096 + 5), random.Random(seed)
    store = await Stores(Path(root), ThreadEngine.open(BufferPool(2, 65536), workers=2)).start()
    view = await store.open(VIEW, len(content.data), content.digest)
    numbers = list(range(content.count))
    chance.shuffle(numbers)
    for number in numbers:
        await view.write(number, content.chunk(number), demand=chance.random() < 0.5)
        if chance.random() < 0.1:
            await view.flush()
        print(number, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def wrong_chunks(view: View, content: Content) -> list[int]:
    """The chunks that are called readable and are not what they should be."""
    readable = [number for number in range(view.chunk_count) if view.is_readable(number)]
    raw = view.path.read_bytes()
    return [
        n for n in readable if raw[n * CHUNK : n * CHUNK + view.length_of(n)] != content.chunk(n)
    ]


def told_before_a_kill(root: Path, seed: int, count: int) -> list[int]:
    """The first ``count`` chunks that a writing child said to be here, before it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(seed)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(count)]
        child.send_signal(signal.SIGKILL)
    return told


@pytest.mark.parametrize("seed", range(6))
async def test_killed_between_any_two_steps_the_store_tells_the_truth(
    tmp_path: Path, engine: ThreadEngine, seed: int
) -> None:
    content = Content(200 * CHUNK + 5)
    root = tmp_path / "root"
    told = told_before_a_kill(root, seed, 10 + 23 * seed)
    store = await Stores(root, engine).start()
    view = await store.open(VIEW, len(content.data), content.digest)
    assert all(view.is_readable(number) for number in told)
    assert wrong_chunks(view, content) == []
    rebooted = await Stores(root, engine).start(NEXT_BOOT)
    again = await rebooted.open(VIEW, len(content.data), content.digest)
    assert again.readable_count == again.durable_count <= view.readable_count
    assert wrong_chunks(again, content) == []
    await rebooted.close()
    await store.close()


@pytest.mark.parametrize("seed", range(20))
async def test_when_the_power_fails_only_synced_chunks_are_believed(
    tmp_path: Path, seed: int
) -> None:
    chance, content = random.Random(seed), Content(40 * CHUNK + 77)
    engine = FaultyEngine(seed)
    stores = Stores(tmp_path / "root", engine)
    for boot in range(4):
        store = await stores.start(bytes([boot]) * 16)
        view = await store.open(VIEW, len(content.data), content.digest)
        assert wrong_chunks(view, content) == []
        durable = view.durable_count
        for number in chance.sample(range(content.count), 15):
            await view.write(number, content.chunk(number), demand=False)
            if chance.random() < 0.15:
                await view.flush()
        assert view.durable_count >= durable
        engine.crash()
    await engine.close()


async def test_a_failed_sync_puts_what_it_covered_in_doubt(tmp_path: Path) -> None:
    content, engine = Content(10 * CHUNK), FaultyEngine(1)
    stores = Stores(tmp_path / "root", engine)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write_run(0, [content.chunk(n) for n in range(4)], demand=False)
    await view.flush()
    await view.write_run(4, [content.chunk(n) for n in range(4, 10)], demand=False)
    engine.faults.error_rate = 1.0
    engine.faults.errors = (errno.EIO,)
    with pytest.raises(UnavailableError, match="look at the disk"):
        await view.flush()
    assert view.unproved() == [4, 5, 6, 7, 8, 9]
    assert [n for n in range(10) if view.is_readable(n)] == [0, 1, 2, 3]
    engine.faults.error_rate = 0.0
    with view.path.open("r+b") as file:  # what the kernel dropped
        file.seek(5 * CHUNK)
        file.write(bytes(CHUNK))
    killed = await stores.start(BOOT)  # the doubt outlives the process
    assert (await killed.open(VIEW, len(content.data), content.digest)).unproved()
    report = await view.prove(100)
    assert (report.proved, report.lost) == (5, 1)
    assert view.durable_count == 9
    assert [n for n in range(10) if not view.is_readable(n)] == [5]
    await view.write(5, content.chunk(5), demand=True)
    await view.flush()
    assert view.complete
    await engine.close()


async def test_what_landed_while_a_sync_failed_is_in_doubt_too(tmp_path: Path) -> None:
    content, engine = Content(4 * CHUNK), FaultyEngine(1)
    store = await Stores(tmp_path / "root", engine).start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(0, content.chunk(0), demand=True)
    sync = engine.fdatasync

    async def fail_late(fd: int) -> None:
        await view.write(1, content.chunk(1), demand=True)
        await view.write(2, content.chunk(2), demand=False)
        raise UnavailableError("look at the disk")

    engine.fdatasync = fail_late  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await view.flush()
    engine.fdatasync = sync  # type: ignore[method-assign]
    assert [n for n in range(4) if view.is_readable(n)] == []
    assert view.unproved() == [0, 1, 2]
    assert await view.flush() == 0
    await view.prove(10)
    assert [n for n in range(4) if view.is_readable(n)] == [0, 1, 2]
    await store.close()
    await engine.close()


async def test_a_view_that_was_released_is_not_touched_any_more(tmp_path: Path) -> None:
    content, engine = Content(4 * CHUNK), FaultyEngine(1)
    store = await Stores(tmp_path / "root", engine).start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(0, content.chunk(0), demand=True)
    await store.release(VIEW)
    assert await view.flush() == 0
    assert (await view.prove(4)).proved == 0
    view.settle()
    with pytest.raises(ClosedError):
        view.missing(Extent(0, CHUNK))
    with pytest.raises(ClosedError):
        await view.write(1, content.chunk(1), demand=True)
    await store.close()
    await engine.close()


@pytest.mark.parametrize("seed", range(8))
async def test_disk_errors_never_make_wrong_bytes_readable(tmp_path: Path, seed: int) -> None:
    chance, content = random.Random(seed), Content(40 * CHUNK + 77)
    engine = FaultyEngine(seed)
    store = await Stores(tmp_path / "root", engine).start()
    view = await store.open(VIEW, len(content.data), content.digest)
    engine.faults.error_rate = 0.3
    failed = 0
    for _ in range(60):
        first = chance.randrange(content.count)
        run = [content.chunk(n) for n in range(first, min(content.count, first + 5))]
        try:
            await view.write_run(first, run, demand=chance.random() < 0.3)
            await view.flush()
        except UnavailableError:
            failed += 1
    assert failed
    assert wrong_chunks(view, content) == []
    engine.faults.error_rate = 0.0
    while view.unproved():
        await view.prove(7)
    assert wrong_chunks(view, content) == []
    await store.close()
    await engine.close()


async def test_a_run_longer_than_a_buffer_is_written_around_what_is_here(tmp_path: Path) -> None:
    content = Content(33 * CHUNK + 1)
    engine = ThreadEngine.open(BufferPool(2, 3 * CHUNK), workers=2)
    store = await Stores(tmp_path / "root", engine).start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(7, content.chunk(7), demand=True)
    parts = [content.chunk(n) for n in range(content.count)]
    assert await view.write_run(0, parts, demand=False) == content.count - 1
    assert view.whole
    assert view.path.read_bytes()[: len(content.data)] == content.data
    await store.close()
    await engine.close()
