"""A full file system: each engine says ENOSPC, never hangs, and goes on when there is room."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ioengine.buffers import BUFFER_BYTES, BufferPool
from ioengine.engine import IoEngine
from ioengine.probe import probe_io_uring
from ioengine.threads import ThreadEngine
from ioengine.uring import UringEngine

pytestmark = pytest.mark.root

OPENERS: dict[str, Callable[[], IoEngine]] = {"threads": lambda: ThreadEngine.open(BufferPool(2))}
if probe_io_uring(Path(tempfile.gettempdir())).allowed:
    OPENERS["uring"] = lambda: UringEngine.open(BufferPool(2))


@pytest.fixture(params=["ext4", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of a few MB."""
    mount, image = tmp_path / "mount", tmp_path / "image"
    mount.mkdir()
    if request.param == "ext4":
        with image.open("wb") as file:
            file.truncate(8 << 20)
        make = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)]
        subprocess.run(make, check=True)
        command = ["mount", "-o", "loop", str(image), str(mount)]
    else:
        command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)]
    subprocess.run(command, check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("name", sorted(OPENERS))
@pytest.mark.parametrize("sync", [False, True])
async def test_a_full_disk_is_said_and_survived(name: str, sync: bool, small: Path) -> None:
    engine = OPENERS[name]()
    fd = os.open(small / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        async with engine.buffers().take() as buffer:
            buffer.memory[:] = b"f" * BUFFER_BYTES
            with pytest.raises(OSError, match=r"write .*/file .*No space left") as caught:
                for number in range(20):
                    await engine.write(fd, buffer, number * BUFFER_BYTES, BUFFER_BYTES, sync=sync)
            assert caught.value.errno == errno.ENOSPC
            os.truncate(fd, BUFFER_BYTES)
            assert await engine.write(fd, buffer, BUFFER_BYTES, 4096, sync=True) == 4096
            assert await engine.read(fd, buffer, BUFFER_BYTES, 8192) == 4096
            assert buffer.memory[:4096] == b"f" * 4096
    finally:
        os.close(fd)
        await engine.close()
