"""Allocated bytes and inodes of a directory tree, which may change or be hostile while it is read.

Each inode counts once however many names it has; links are not followed and other file systems not
entered. Depth is not limited by PATH_MAX or by the number of open files.
"""

from __future__ import annotations

import os
from pathlib import Path

from snapshotter.snapshots.model import Usage

_BLOCK_BYTES = 512
_LONG_PATH = 2048


class _Base:
    """A directory held open; closed when the last path that starts at it is forgotten."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def measure(root: Path) -> Usage:
    """What ``root`` and all below it takes; what vanishes meanwhile isn't counted.

    FileNotFoundError if ``root`` itself is missing. A link as root is measured as a link.
    """
    top = os.lstat(root)
    size_bytes, seen = top.st_blocks * _BLOCK_BYTES, {top.st_ino}
    if not _is_directory(top):
        return Usage(size_bytes, 1)
    pending = [(_Base(os.open(root, _FLAGS)), ".")]
    while pending:
        base, path = pending.pop()
        try:
            if len(path) > _LONG_PATH:
                base, path = _Base(os.open(path, _FLAGS, dir_fd=base.fd)), "."
            fd = os.open(path, _FLAGS, dir_fd=base.fd)
        except OSError:
            continue
        try:
            for name, status in _children(fd):
                if status.st_dev != top.st_dev or status.st_ino in seen:
                    continue
                seen.add(status.st_ino)
                size_bytes += status.st_blocks * _BLOCK_BYTES
                if _is_directory(status):
                    pending.append((base, f"{path}/{name}"))
        finally:
            os.close(fd)
    return Usage(size_bytes, len(seen))


_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _children(fd: int) -> list[tuple[str, os.stat_result]]:
    found = []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
                except OSError:
                    continue
    except OSError:
        return found
    return found


def _is_directory(status: os.stat_result) -> bool:
    return (status.st_mode & 0o170000) == 0o040000
