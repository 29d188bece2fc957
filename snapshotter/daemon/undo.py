"""What must be undone at the stop, in reverse, whatever fails on the way.

Nothing is undone that was not noted, so a start that breaks off half-way leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Undo:
    """A stack of things to do at the stop; a failure is logged and never stops the others."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()

    def later(self, undo: Callable[..., object], *args: object) -> None:
        """Have ``undo(*args)`` run, awaited if need be, before everything noted earlier."""

        async def run() -> None:
            try:
                result = undo(*args)
                if asyncio.iscoroutine(result):
                    await result
            except Exception:
                log.exception("stopping: %s failed", getattr(undo, "__qualname__", undo))

        self._stack.push_async_callback(run)

    async def run(self) -> None:
        """Undo everything, last first; a second call has nothing to do."""
        await self._stack.aclose()
