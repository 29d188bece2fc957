"""What a reader is likely to read next, fetched before it asks; nobody waits for it.

The guard sees every read and tells who reads in order and how far that will go: that much comes
with what it waits for. Of any other reader little is known: what lies behind its read comes once it
goes on, the less the fewer readers of that view read on. It is given up at the first fault.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from ioengine.guard import Miss
from snapshotter.content import CHUNK_BYTES, Digest, Extent
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

AT_ONCE = 64
AHEAD_S = 30.0
IN_ORDER_FACTOR = 8
"""Readers in order have shown that they read on: so many times as much lies before them."""
REQUEST_FACTOR = 12
"""And so many times what a request costs, in stored bytes: a few requests are under way while they
read, and plain bytes are about three times as many."""
MOST_BYTES = 64 * 1024 * 1024
_ALL = 255


class Road(Protocol):
    """Have these bytes here (fetch.py)."""

    async def ensure(
        self, view: Digest, extent: Extent, *, demand: bool, deadline_s: float
    ) -> None: ...

    @property
    def request_bytes(self) -> int:
        """Stored bytes that come in the time that a request takes to begin."""
        ...


class ReadAhead:
    """Event loop only. ``behind_bytes``: plain bytes behind a read of a reader without order."""

    def __init__(self, road: Road, behind_bytes: int) -> None:
        self._road = road
        self._behind_bytes = behind_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def most_bytes(self) -> int:
        """The most that a reader in order has before it; 0: nothing is read ahead."""
        if not self._behind_bytes:
            return 0
        by_link = min(MOST_BYTES, self._road.request_bytes * REQUEST_FACTOR)
        return max(self._behind_bytes * IN_ORDER_FACTOR, by_link)

    def behind(self, miss: Miss) -> int:
        """Bytes behind a miss of a reader without order; 0: nothing that is worth a request.

        All of it while half of the view's readers read on, and less the fewer do.
        """
        length = self._behind_bytes * min(_ALL, 2 * miss.again) // _ALL
        return length if 2 * length >= CHUNK_BYTES else 0

    def start(self, view: Digest, extent: Extent) -> None:
        """Have ``extent``, unless very much is being read ahead already."""
        if len(self._tasks) >= AT_ONCE or not self._behind_bytes:
            return
        task = asyncio.create_task(self._read(view, extent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Read nothing more."""
        await end_all(self._tasks)

    async def _read(self, view: Digest, extent: Extent) -> None:
        try:
            await self._road.ensure(view, extent, demand=False, deadline_s=AHEAD_S)
        except Exception as error:
            log.debug("reading ahead in %s: %s", view, error)
