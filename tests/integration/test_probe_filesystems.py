"""The probe on file systems that allow less: it says so, and an engine is chosen all the same."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ioengine.probe import choose_engine, probe

pytestmark = pytest.mark.root


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system without O_DIRECT."""
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_file_system_without_direct_io_is_said_to_be_one(ramfs: Path) -> None:
    report = probe(ramfs)
    assert not report.direct.allowed
    assert report.direct_alignment_bytes == 0
    assert f"O_DIRECT fails in {ramfs}" in report.direct.reason
    assert "ext4" in report.direct.way_out
    assert list(ramfs.iterdir()) == []


async def test_an_engine_works_there_all_the_same(ramfs: Path) -> None:
    choice = choose_engine(ramfs, buffer_count=1)
    fd = os.open(ramfs / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    async with choice.engine.buffers().take() as buffer:
        buffer.memory[:4] = b"data"
        assert await choice.engine.write(fd, buffer, 0, 4, sync=True) == 4
    assert os.pread(fd, 9, 0) == b"data"
    os.close(fd)
    await choice.engine.close()
