"""Directories on the disk: the names in them made durable.

Syncing a file keeps its bytes through a power loss, but not the name that it was given: that is
the directory's. Knows nothing of what the files are.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Put on the disk which names ``path`` holds; blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
