"""Room for a start: set aside while the disk has some, so that a full disk keeps no daemon away.

What a kernel and a file system can do is found out by trying, which takes files. Readers of what
is not here yet wait for the daemon, so it has to come up on a disk that is full to the last block.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ioengine.directories import sync_directory
from snapshotter.chunks.space import BALLAST, is_full

log = logging.getLogger(__name__)

ROOM_BYTES = 1024 * 1024
NAME = "room"


@contextlib.contextmanager
def room_to_try(root: Path) -> Iterator[None]:
    """What was set aside is free as long as the block lasts, and is set aside again after it."""
    path = root / NAME
    if path.exists():
        path.unlink()
    else:
        _borrow(root / BALLAST)
    sync_directory(root)  # a journaling file system frees with its next commit
    try:
        yield
    finally:
        _set_aside(path)


def _borrow(ballast: Path) -> None:
    """For this start and for the next one: a killed one has used up what was set aside.

    The ballast grows back by itself.
    """
    with contextlib.suppress(FileNotFoundError):
        held = ballast.stat().st_size
        os.truncate(ballast, max(0, held - 2 * ROOM_BYTES))


def _set_aside(path: Path) -> None:
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(descriptor, 0, ROOM_BYTES)
    except OSError as error:
        path.unlink(missing_ok=True)
        if not is_full(error):
            raise
        log.error("%s is full: no room could be set aside for the next start", path.parent)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
