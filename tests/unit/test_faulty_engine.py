"""What must hold of the engines' faulty twin: same seed, same run; no crash undoes a sync."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.engine import SECTOR_BYTES, Faults, FaultyEngine


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield fd
    os.close(fd)


async def put(engine: FaultyEngine, fd: int, offset: int, data: bytes, *, sync: bool) -> int:
    async with engine.buffers().take() as buffer:
        buffer.memory[: len(data)] = data
        return await engine.write(fd, buffer, offset, len(data), sync=sync)


async def history(seed: int, fd: int) -> list[object]:
    """The order and the outcomes of the same requests under ``seed``."""
    engine = FaultyEngine(seed, Faults(error_rate=0.3, delay_turns=6))
    told: list[object] = []

    async def one(number: int) -> None:
        try:
            count = await put(engine, fd, number * 512, bytes(512), sync=False)
            told.append((number, count))
        except OSError as error:
            told.append((number, error.errno))

    await asyncio.gather(*(one(number) for number in range(30)))
    await engine.close()
    return told


async def test_the_same_seed_gives_the_same_run(file: int) -> None:
    first = await history(11, file)
    assert first == await history(11, file)
    assert first != await history(12, file)
    assert {outcome[1] for outcome in first if isinstance(outcome, tuple)} == {512, errno.EIO}
    assert first != sorted(first, key=str)


async def test_a_full_disk_takes_what_fits_and_says_so(file: int) -> None:
    engine = FaultyEngine(faults=Faults(space_bytes=1000))
    with pytest.raises(OSError, match="No space left") as caught:
        await put(engine, file, 0, b"x" * 1500, sync=True)
    assert caught.value.errno == errno.ENOSPC
    assert os.fstat(file).st_size == 1000
    engine.faults.space_bytes = None
    assert await put(engine, file, 0, b"y" * 1500, sync=False) == 1500
    await engine.close()


@pytest.mark.parametrize("seed", range(20))
async def test_a_crash_keeps_what_was_synced_and_tears_only_what_was_not(
    seed: int, file: int
) -> None:
    engine = FaultyEngine(seed)
    size_bytes = 8 * SECTOR_BYTES
    await put(engine, file, 0, b"a" * size_bytes, sync=True)
    await put(engine, file, 0, b"b" * (size_bytes // 2), sync=False)
    await engine.fdatasync(file)
    await put(engine, file, SECTOR_BYTES, b"c" * (size_bytes + 100), sync=False)
    engine.crash()
    content = os.pread(file, 1 << 20, 0)
    before = b"b" * (size_bytes // 2) + b"a" * (size_bytes // 2)
    assert len(content) in (size_bytes, size_bytes + SECTOR_BYTES + 100)
    assert content[:SECTOR_BYTES] == before[:SECTOR_BYTES]
    for start in range(SECTOR_BYTES, len(content), SECTOR_BYTES):
        sector = content[start : start + SECTOR_BYTES]
        old = before[start : start + SECTOR_BYTES] or bytes(len(sector))
        assert sector in (b"c" * len(sector), old)
    await engine.close()


async def test_a_crash_loses_something_sometimes_and_everything_is_possible(file: int) -> None:
    outcomes = set()
    for seed in range(30):
        engine = FaultyEngine(seed)
        await put(engine, file, 0, b"a" * 1024, sync=True)
        await put(engine, file, 0, b"b" * 1024, sync=False)
        engine.crash()
        content = os.pread(file, 1024, 0)
        outcomes.add((content[:1], content[512:513]))
        await engine.close()
    assert outcomes == {(first, second) for first in (b"a", b"b") for second in (b"a", b"b")}
