"""The directories behind the rows: ``snapshots/<id>/{fs,work}``, and ``trash/`` for what goes.

A directory is made before its row and thrown away after it, so a process killed at any point leaves
at most directories without a row, which ``orphans`` finds. An id is named once and never again.
Nothing here knows the database: callers say which ids have rows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
from pathlib import Path

from snapshotter.snapshots.model import Kind

_log = logging.getLogger(__name__)


class Directories:
    """All calls block for a few system calls; they belong in a thread."""

    def __init__(self, root: Path) -> None:
        self._snapshots = root / "snapshots"
        self._base = str(self._snapshots)
        self.trash = root / "trash"
        self._ids = itertools.count(1)
        self._making: set[int] = set()
        self._lock = threading.Lock()

    def start(self, last_id: int) -> None:
        """Make the two folders; ids go on behind the highest that has a row or a directory."""
        for folder in (self._snapshots, self.trash):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ids = itertools.count(max([last_id, *self.present()]) + 1)

    def path(self, snapshot_id: int) -> Path:
        """The directory of a snapshot."""
        return self._snapshots / str(snapshot_id)

    def layer(self, snapshot_id: int) -> Path:
        """What overlayfs stacks: the directory, or for a lazy layer the link, with the files."""
        return self._snapshots / str(snapshot_id) / "fs"

    def present(self) -> list[int]:
        """The ids that have a directory; whatever else lies there isn't ours."""
        with os.scandir(self._snapshots) as entries:
            return [int(e.name) for e in entries if e.name.isascii() and e.name.isdecimal()]

    def reserve(self) -> int:
        """A new id, not ``unclaimed`` until ``settled``."""
        with self._lock:
            snapshot_id = next(self._ids)
            self._making.add(snapshot_id)
        return snapshot_id

    def settled(self, snapshot_id: int) -> None:
        """The row of a reserved id is durable, or its directory is in the trash."""
        with self._lock:
            self._making.discard(snapshot_id)

    def make(self, snapshot_id: int, kind: Kind, owner_of: int | None = None) -> bool:
        """Make the directory of an active snapshot or a view, or an empty one for a lazy layer.

        Modes do not depend on the umask: what is mounted starts as 0755, as from containerd, and
        has the owner that the root of ``owner_of`` has. False if that can't be seen now: it is
        being removed, or it is a lazy layer whose data is.
        """
        base = f"{self._base}/{snapshot_id}"
        _make(base, 0o700)
        if kind is not Kind.COMMITTED:
            _make(f"{base}/fs", 0o755)
        if kind is Kind.ACTIVE:
            _make(f"{base}/work", 0o711)
        return owner_of is None or self.copy_owner(owner_of, snapshot_id)

    def copy_owner(self, parent_id: int, snapshot_id: int) -> bool:
        """Give the root of a snapshot the owner that its parent's root has, if both are here."""
        try:
            status = os.stat(f"{self._base}/{parent_id}/fs")  # noqa: PTH116 (quick)
            if status.st_uid or status.st_gid:
                own = f"{self._base}/{snapshot_id}/fs"
                os.chown(own, status.st_uid, status.st_gid, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def discard(self, snapshot_id: int) -> None:
        """Move a directory into the trash; what is gone already is fine."""
        target = self.trash / f"{snapshot_id}-{secrets.token_hex(6)}"
        try:
            self.path(snapshot_id).rename(target)
        except FileNotFoundError:
            return

    def unclaimed(self) -> list[int]:
        """The ids with a directory that nobody is making; which of them have no row are orphans.

        Read the rows after this, never before: an id that is settled by now has a durable row.
        Asking for the ids in the making after the rows would miss one settled between the two.
        """
        listed = self.present()
        with self._lock:
            making = set(self._making)
        return [ident for ident in listed if ident not in making]


def _make(path: str, mode: int) -> None:
    """By a plain name: a Path is taken apart and put together again at each step."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode)  # noqa: PTH102 (quick)
    os.chmod(path, mode)  # noqa: PTH101 (quick)
