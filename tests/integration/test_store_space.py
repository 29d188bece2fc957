"""A full file system under the chunk store: eviction, then ballast, then an error; never a hang."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine
from snapshotter.chunks.space import Evict, SpaceLimits, evict_nothing
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.content import CHUNK_BYTES, Digest, Extent
from snapshotter.errors import NoSpaceError
from snapshotter.fetch import LayerSource, Road
from snapshotter.image.indexer import IndexLimits
from tests.fakes.tier import FakeTier
from tests.unit.image.layers import index_of

pytestmark = pytest.mark.root

MIB = 1 << 20
LENGTH = 60 * MIB
DATA = random.Random(5).randbytes(LENGTH)
VIEW = Digest("sha256", "5e" * 32)


def chunk(number: int) -> bytes:
    return DATA[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def digest(number: int) -> bytes:
    return blake3(chunk(number)).digest()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4, with a journal, of 32 MB."""
    mount, image = tmp_path / "mount", tmp_path / "image"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture
async def engine() -> AsyncIterator[ThreadEngine]:
    engine = ThreadEngine.open(BufferPool(2), workers=2)
    yield engine
    await engine.close()


async def started(root: Path, engine: ThreadEngine, evict: Evict = evict_nothing) -> ViewStore:
    limits = SpaceLimits(ballast_bytes=4 * MIB, keep_free_bytes=2 * MIB, release_bytes=MIB)
    store = ViewStore(
        StoreConfig(root, space=limits), engine, in_use=lambda path: False, evict=evict
    )
    await store.start()
    return store


async def test_a_full_disk_takes_the_ballast_and_then_says_so(
    small: Path, engine: ThreadEngine
) -> None:
    store = await started(small, engine)
    view = await store.open(VIEW, LENGTH, digest)
    number = 0
    with pytest.raises(NoSpaceError, match=f"no space for chunks under {small}"):
        for number in range(view.chunk_count):
            await view.write_run(number, [chunk(number)], demand=False)
    behind = number
    assert store.space.free_bytes() >= 2 * MIB - CHUNK_BYTES
    assert (small / "ballast").stat().st_size == 4 * MIB
    async with asyncio.timeout(60):
        with pytest.raises(NoSpaceError):
            for number in range(behind, view.chunk_count):
                await view.write(number, chunk(number), demand=True)
    assert (number - behind) * CHUNK_BYTES >= 5 * MIB  # what was kept free, and the ballast
    assert (small / "ballast").stat().st_size == 0
    assert view.missing(Extent(0, LENGTH)) == list(range(number, view.chunk_count))
    await view.flush()  # what was promised found its place on the disk
    with view.path.open("rb") as file:
        assert file.read(number * CHUNK_BYTES) == DATA[: number * CHUNK_BYTES]
    await store.close()


async def test_what_is_evicted_makes_room(small: Path, engine: ThreadEngine) -> None:
    old = Digest("sha256", "01" * 32)

    async def evict(length: int) -> int:
        before = store.space.free_bytes()
        await store.drop(old)
        return store.space.free_bytes() - before

    store = await started(small, engine, evict)
    first = await store.open(old, LENGTH, digest)
    for number in range(10 * MIB // CHUNK_BYTES):
        await first.write(number, chunk(number), demand=True)
    view = await store.open(VIEW, LENGTH, digest)
    async with asyncio.timeout(60):
        for number in range(20 * MIB // CHUNK_BYTES):
            await view.write(number, chunk(number), demand=True)
    assert (small / "ballast").stat().st_size == 4 * MIB
    assert not first.path.exists()
    assert view.readable_count == 20 * MIB // CHUNK_BYTES
    await store.close()


async def test_a_whole_stream_that_finds_no_room_leaves_nothing(
    small: Path, engine: ThreadEngine
) -> None:
    store = await started(small, engine)
    staging = store.stage(VIEW)
    with pytest.raises(NoSpaceError):
        for offset in range(0, LENGTH, MIB):
            await asyncio.to_thread(staging.sink, offset, memoryview(DATA)[offset : offset + MIB])
    assert 2 * MIB - CHUNK_BYTES <= store.space.free_bytes() < 4 * MIB
    assert (small / "ballast").stat().st_size == 4 * MIB
    await asyncio.to_thread(staging.discard)
    assert list((small / "staging").iterdir()) == []
    assert store.space.free_bytes() > 10 * MIB
    await store.close()


async def test_a_stream_that_cannot_fit_is_refused_before_its_first_byte(
    small: Path, engine: ThreadEngine
) -> None:
    store = await started(small, engine)
    with pytest.raises(NoSpaceError, match=f"{LENGTH} bytes of .* would leave less than"):
        store.stage(VIEW, LENGTH)
    assert list((small / "staging").iterdir()) == []
    store.stage(VIEW, 10 * MIB).discard()
    await store.close()


async def test_a_stream_is_taken_over_by_an_open_view_without_room_for_it_twice(
    small: Path, engine: ThreadEngine
) -> None:
    store = await started(small, engine)
    length = 14 * MIB
    view = await store.open(VIEW, length, digest)
    await view.write(3, chunk(3), demand=True)
    staging = store.stage(VIEW, length)
    await asyncio.to_thread(staging.sink, 0, memoryview(DATA)[:length])
    assert store.space.free_bytes() < length
    sealed = await store.seal(staging, length, digest)
    assert sealed is view and view.complete
    assert view.path.read_bytes() == DATA[:length]
    assert list((small / "staging").iterdir()) == []
    await store.close()


async def test_a_new_view_on_a_full_disk_is_refused_by_name(
    small: Path, engine: ThreadEngine
) -> None:
    store = await started(small, engine)
    with (small / "hog").open("wb") as hog, pytest.raises(OSError, match="No space"):
        while True:
            hog.write(bytes(MIB))
            hog.flush()
    with pytest.raises(NoSpaceError, match="no space for chunks under"):
        for number in range(2000):
            await store.open(Digest("sha256", f"{number:064x}"), LENGTH, digest)
    (small / "hog").unlink()
    assert (await store.open(VIEW, LENGTH, digest)).readable_count == 0
    await store.close()


async def test_a_reader_is_told_at_once_and_the_next_one_served(
    small: Path, engine: ThreadEngine, tmp_path: Path
) -> None:
    (tmp_path / "index").mkdir()
    index = index_of(DATA, DATA, tmp_path / "index", limits=IndexLimits())
    tier = FakeTier(piece_bytes=MIB)
    source = LayerSource(index, (tier.add("r/app", DATA, index.layer),))

    class Known:
        def of_view(self, view: Digest) -> list[LayerSource]:
            return [source]

        def look_further(self, view: Digest) -> None:
            return None

    store = await started(small, engine)
    road = Road(store, Known(), [tier])
    async with asyncio.timeout(60):
        with pytest.raises(NoSpaceError):
            await road.ensure(index.diff_id, Extent(0, LENGTH), demand=True)
        view = store.get(index.diff_id)
        assert view is not None
        here = view.readable_count
        assert here * CHUNK_BYTES > 15 * MIB
        await road.ensure(index.diff_id, Extent(0, MIB), demand=True)
        await road.stop(index.diff_id)
        await store.drop(index.diff_id)
        await road.ensure(index.diff_id, Extent(LENGTH - MIB, MIB), demand=True)
    await road.close()
    await store.close()
