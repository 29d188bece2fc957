"""Deletes what was thrown away, slowly and carefully: the trees were written by strangers.

Never follows a link, never enters a mount, and needs neither long paths nor many descriptors for
a deep tree: what lies too deep is lifted to the top of the trash and deleted from there. What can't
be deleted (immutable files, a mount inside) stays for the next time and is logged once per run.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ioengine.mounts import mountinfo

_log = logging.getLogger(__name__)

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64


def mount_points() -> list[Path]:
    """Where something is mounted in this mount namespace."""
    return [mount.target for mount in mountinfo()]


class Trash:
    """Empties one folder. ``empty`` blocks; ``stop`` makes it return after the current entry."""

    def __init__(self, folder: Path, mounted: Callable[[], Iterable[Path]] = mount_points) -> None:
        self._folder = folder
        self._mounted = mounted
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def empty(self) -> int:
        """Delete all that can be deleted; returns how many trees had to stay."""
        failed: set[str] = set()
        while not self._stop.is_set():
            names = [name for name in sorted(self._names()) if name not in failed]
            if not names:
                break
            mounted = list(self._mounted())
            failed.update(name for name in names if not self._delete(name, mounted))
        return len(failed)

    def _names(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            return [entry.name for entry in entries]

    def _delete(self, name: str, mounted: list[Path]) -> bool:
        tree = self._folder / name
        try:
            inside = [point for point in mounted if point.is_relative_to(tree)]
            if inside:
                _log.warning("%s stays: %s is mounted there", tree, inside[0])
                return False
            if tree.is_symlink() or not tree.is_dir():
                tree.unlink()
                return True
            folder = os.open(self._folder, _FLAGS)
            try:
                return self._delete_directory(folder, folder, name, 0)
            finally:
                os.close(folder)
        except OSError as error:
            _log.warning("%s stays for now: %s", tree, error)
            return False

    def _delete_directory(self, top: int, parent: int, name: str, depth: int) -> bool:
        fd = os.open(name, _FLAGS, dir_fd=parent)
        try:
            with os.scandir(fd) as entries:
                children = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
            whole = True
            for child, is_directory in children:
                if self._stop.is_set():
                    return False
                try:
                    whole = self._delete_child(top, fd, child, is_directory, depth) and whole
                except FileNotFoundError:
                    continue
                except OSError as error:
                    _log.warning("cannot delete %r in %s: %s", child, self._folder, error)
                    whole = False
        finally:
            os.close(fd)
        if whole:
            os.rmdir(name, dir_fd=parent)
        return whole

    def _delete_child(self, top: int, fd: int, name: str, is_directory: bool, depth: int) -> bool:
        if not is_directory:
            os.unlink(name, dir_fd=fd)
            return True
        if depth < _MAX_DEPTH:
            return self._delete_directory(top, fd, name, depth + 1)
        os.rename(name, f"deep-{secrets.token_hex(8)}", src_dir_fd=fd, dst_dir_fd=top)
        return True
