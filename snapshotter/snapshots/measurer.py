"""Measures committed snapshots some time after their commit, and stores what they take.

Not within the commit: containerd holds its metadata locked meanwhile, and a big layer takes long
to walk. Not right after it either: our fsync would get in the way of containerd's. A snapshot that
wasn't measured yet, or not before a stop, is measured when its usage is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from typing import Final

from snapshotter.errors import EmberError
from snapshotter.snapshots import metastore
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.model import Usage
from snapshotter.snapshots.storage import Storage

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 4096
"""More than these are measured when asked for."""


class Measurer:
    """``note`` what was committed; ``run`` until ``stop``."""

    def __init__(self, database: Database, storage: Storage, delay_s: float) -> None:
        self._db = database
        self._storage = storage
        self._delay_s = delay_s
        self._waiting: list[int] = []
        self._noted = asyncio.Event()
        self._stopping = asyncio.Event()

    def note(self, snapshot_id: int) -> None:
        """A snapshot was committed."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(snapshot_id)
            self._noted.set()

    def stop(self) -> None:
        """Let ``run`` end; what waits is measured when asked for."""
        self._stopping.set()
        self._noted.set()

    async def run(self) -> None:
        """Measure what was noted, in groups that are written at once."""
        while True:
            await self._noted.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            self._noted.clear()
            group, self._waiting = self._waiting, []
            await self._measure(group)

    async def _measure(self, group: list[int]) -> None:
        usages: dict[int, Usage] = {}
        for snapshot_id in group:
            if self._stopping.is_set():
                return
            with contextlib.suppress(EmberError, OSError):  # removed meanwhile
                usages[snapshot_id] = await self._storage.measure(snapshot_id)

        def store(connection: sqlite3.Connection) -> None:
            for snapshot_id, usage in usages.items():
                metastore.set_usage(connection, snapshot_id, usage)

        try:
            await self._db.write(store)
        except EmberError as error:
            _log.info("usages of %d snapshots are measured when asked for: %s", len(group), error)
