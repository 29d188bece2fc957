"""Work that is finished once it has begun, also when whoever asked for it has gone.

A client may hang up between a mount and the record of it; a cancelled caller leaves, the work does
not. It knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Unbroken:
    """Event loop only. Life: ``begin`` and ``finish`` at any time, ``close`` in the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` as a task that is remembered until it ends; nobody need await it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises; it runs to its end also if the caller is cancelled."""
        task = self.begin(work)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error, if there is one, has come through this frame

    async def close(self, wait_s: float) -> None:
        """Wait for what has begun; what is not over in ``wait_s`` is cancelled, and named."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=wait_s)
        for task in late:
            log.warning("stopping without waiting for %s", task.get_coro())
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it hears of it; nobody may, if the caller is gone
