"""Directories on the disk: names that stand for whole files, and that are made durable.

Syncing a file keeps its bytes through a power loss, but not the name that it was given: that is
the directory's. Knows nothing of what the files are.
"""

from __future__ import annotations

import os
from pathlib import Path

TEMPORARY = ".tmp"
"""At the end of the name of a file that is being written: one that stays behind is nobody's."""


def sync_directory(path: Path) -> None:
    """Put on the disk which names ``path`` holds; blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes | memoryview, *, synced: bool) -> None:
    """Have ``path`` hold ``data``, whatever is killed when: all of it, or what was there before.

    ``synced``: through a power loss too, though not that the name is there. Blocks. One writer of a
    path at a time. Raises OSError.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it is in the way
        raise
