"""How long nothing has come of a stream: for the status, and for the log while it lasts.

An operator shall see that a first pull does not get on before somebody's start fails for it. By the
event loop's own clock, which no test need turn: it only tells.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Self

log = logging.getLogger(__name__)

LONG_S = 10.0
AGAIN_S = 60.0


class Quiet:
    """Event loop only. A context manager around the work; ``came`` whenever something comes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._told_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self.came()
        self._look()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def came(self) -> None:
        """Something has come."""
        self._last_s = self._loop.time()
        if self._told_s is not None:
            log.info("%s: it goes on", self._what)
            self._told_s = None

    @property
    def seconds(self) -> float:
        """Since when nothing has come, if that is long; else 0."""
        quiet_s = self._loop.time() - self._last_s
        return quiet_s if quiet_s >= LONG_S else 0.0

    def _look(self) -> None:
        now_s = self._loop.time()
        again = self._told_s is None or now_s - self._told_s >= AGAIN_S
        if self.seconds and again:
            self._told_s = now_s
            log.warning("%s: nothing has come for %.0f s", self._what, self.seconds)
        self._timer = self._loop.call_later(LONG_S / 4, self._look)
