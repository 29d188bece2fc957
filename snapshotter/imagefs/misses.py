"""The kernel's questions: a read of a hole waits in the kernel until the road has the bytes.

Each miss becomes one question to the road and is answered exactly once: ALLOW when the bytes are
here, EIO when `miss_timeout` passed. Orphans of a dead daemon are answered before the group is read
again, because new events would get the same numbers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ioengine.guard import Guard, Miss, Orphan
from snapshotter.clock import Clock
from snapshotter.content import CHUNK_BYTES, Digest, Extent
from snapshotter.errors import DeadlineError, EmberError, NoSpaceError, UnavailableError

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
SAME_READ_S = 1.0
"""A read that is denied asks again for its parts at once (readahead, then page by page): for so
long those get the same answer, or one read(2) would wait for several times ``miss_timeout``. Only
what failed after a wait is kept so: a full disk says so at once, and may soon have room again."""
RECENT_FAILURES = 4096
STOPPED_S = 0.1
AHEAD_AT_ONCE = 64
AHEAD_S = 30.0


class Road(Protocol):
    """Have these bytes here, verified (fetch.py)."""

    async def ensure(
        self, view: Digest, extent: Extent, *, demand: bool, deadline_s: float
    ) -> None: ...


class Views(Protocol):
    """Which view is behind an inode number of the view directory."""

    async def by_inode(self, inode: int) -> Digest | None: ...

    async def length(self, view: Digest) -> int: ...

    def incomplete(self) -> Sequence[Digest]:
        """The incomplete views that are mounted: where an orphan's range may lie."""
        ...


@dataclass(slots=True)
class MissCounts:
    """What became of the kernel's questions since the daemon started."""

    asked: int = 0
    filled: int = 0
    failed: int = 0
    waited_s: float = 0.0
    longest_s: float = 0.0


class MissPump:
    """Moves misses from the guard to the road and answers back."""

    def __init__(
        self,
        guard: Guard,
        road: Road,
        views: Views,
        clock: Clock,
        miss_timeout_s: float,
        ahead_bytes: int = 0,
    ) -> None:
        self._guard = guard
        self._road = road
        self._views = views
        self._clock = clock
        self._timeout_s = miss_timeout_s
        self._failures: dict[tuple[Digest, int], tuple[float, int]] = {}
        self._ahead_bytes = ahead_bytes
        self._ahead = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._beginning: asyncio.Task[None] | None = None
        self._logged: dict[str, float] = {}
        self.counts = MissCounts()

    def start(self) -> None:
        """Settle the orphans, then listen: both in the background, in that order."""
        self._beginning = asyncio.create_task(self._begin(), name="settle orphans")

    async def _begin(self) -> None:
        count = await self.settle_orphans()
        if count:
            log.warning("%d reads that an earlier daemon left waiting were answered", count)
        self._guard.start()
        asyncio.get_running_loop().add_reader(self._guard.fileno(), self._collect)

    async def stop(self) -> None:
        """Stop listening; what is unanswered waits in the kernel for a successor."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._guard.fileno())
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._guard.stop()

    async def settle_orphans(self) -> int:
        """Answer what a dead daemon left; returns how many there were."""
        orphans = list(self._guard.orphans)
        await asyncio.gather(*(self._settle(orphan) for orphan in orphans))
        return len(orphans)

    async def _settle(self, orphan: Orphan) -> None:
        known = await self._views.by_inode(orphan.inode) if orphan.inode else None
        views = [known] if known is not None else list(self._views.incomplete())
        error = 0
        for view in views:
            extent = await self._clip(view, orphan.offset, orphan.length)
            failure = None if extent is None else await self._have(view, extent)
            error = error or failure or 0
        self._guard.settle(orphan, error)

    async def _clip(self, view: Digest, offset: int, length: int | None) -> Extent | None:
        """The range inside the view; without a length all that follows. None: nothing to fill."""
        end = await self._views.length(view)
        stop = end if length is None else min(offset + length, end)
        return Extent(offset, stop - offset) if stop > offset else None

    def _collect(self) -> None:
        for miss in self._guard.misses():
            task = asyncio.create_task(self._answer(miss))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, miss: Miss) -> None:
        self.counts.asked += 1
        began_s = self._clock.monotonic_s()
        view = await self._views.by_inode(miss.inode) if miss.inode else None
        if view is None:
            log.error("pid %d reads an unknown view file (inode %d); denied", miss.pid, miss.inode)
            self._guard.deny(miss, errno.EIO)
            return
        extent = await self._clip(view, miss.offset, miss.length)
        failure = None if extent is None else await self._try(view, extent)
        waited_s = self._clock.monotonic_s() - began_s
        self.counts.waited_s += waited_s
        self.counts.longest_s = max(self.counts.longest_s, waited_s)
        if failure is None:
            self.counts.filled += 1
            self._guard.allow(miss)
            if extent is not None:
                await self._read_ahead(view, extent.end)
        else:
            self.counts.failed += 1
            self._guard.deny(miss, failure)

    async def _read_ahead(self, view: Digest, offset: int) -> None:
        """What follows a miss is likely to be read next, and its decoder stands right there.

        Behind every reader, and given up at the first fault: nobody asked for it.
        """
        if not self._ahead_bytes or self._ahead >= AHEAD_AT_ONCE:
            return
        extent = await self._clip(view, offset, self._ahead_bytes)
        if extent is None:
            return
        self._ahead += 1
        try:
            await self._road.ensure(view, extent, demand=False, deadline_s=AHEAD_S)
        except EmberError as error:
            log.debug("reading ahead in %s: %s", view, error)
        finally:
            self._ahead -= 1

    async def _try(self, view: Digest, extent: Extent) -> int | None:
        """As `_have`, but parts of a read that has just failed fail with it."""
        chunks = [(view, number) for number in extent.chunks(CHUNK_BYTES)]
        now_s = self._clock.monotonic_s()
        for chunk in chunks:
            until_s, failure = self._failures.get(chunk, (0.0, 0))
            if now_s < until_s:
                return failure
        denied = await self._have(view, extent)
        if denied is not None and self._clock.monotonic_s() - now_s >= SAME_READ_S:
            if len(self._failures) > RECENT_FAILURES:
                self._failures.clear()
            until_s = self._clock.monotonic_s() + SAME_READ_S
            self._failures.update(dict.fromkeys(chunks, (until_s, denied)))
        return denied

    async def _have(self, view: Digest, extent: Extent) -> int | None:
        """None when the bytes are here, else the errno that the reader gets."""
        try:
            await self._ensure(view, extent)
        except NoSpaceError as error:
            self._complain(view, extent, error)
            return errno.ENOSPC
        except EmberError as error:
            self._complain(view, extent, error)
            return errno.EIO
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("filling %s at %d failed", view, extent.offset)
            return errno.EIO
        return None

    async def _ensure(self, view: Digest, extent: Extent) -> None:
        """Until the deadline, also when the work was stopped under it.

        That happens when somebody tries to drop a view that turns out to be in use.
        """
        until_s = self._clock.monotonic_s() + self._timeout_s
        while True:
            left_s = until_s - self._clock.monotonic_s()
            try:
                await self._road.ensure(view, extent, demand=True, deadline_s=left_s)
            except DeadlineError:
                raise
            except UnavailableError:
                if left_s <= STOPPED_S:
                    raise
                await self._clock.sleep(STOPPED_S)
            else:
                return

    def _complain(self, view: Digest, extent: Extent, error: EmberError) -> None:
        """One line for each view and kind of fault in ``LOG_EVERY_S``: storms stay readable."""
        now_s = self._clock.monotonic_s()
        key = f"{view} {type(error).__name__}"
        last_s = self._logged.get(key)
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            return
        if len(self._logged) > 1024:
            self._logged.clear()
        self._logged[key] = now_s
        log.error(
            "a reader of view %s gets an error for bytes %d to %d: %s",
            view,
            extent.offset,
            extent.end,
            error,
        )
