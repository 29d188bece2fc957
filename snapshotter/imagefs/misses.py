"""The kernel's questions: a read of a hole waits in the kernel until the road has the bytes.

Each miss becomes one question to the road and is answered exactly once: ALLOW when the bytes are
here, EIO when `miss_timeout` passed. Orphans of a dead daemon are answered like all others: no new
event can get their numbers, and those few that one could get are answered before it is read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from ioengine.guard import Ahead, Guard, Miss, Orphan
from snapshotter.chunks.datafile import ClosedError
from snapshotter.clock import Clock
from snapshotter.content import CHUNK_BYTES, Digest, Extent
from snapshotter.errors import DeadlineError, EmberError, NoSpaceError, UnavailableError
from snapshotter.fetch.tally import Tally
from snapshotter.imagefs.complaints import Complaints
from snapshotter.imagefs.readahead import ReadAhead
from snapshotter.imagefs.waiting import WaitingReads
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

SAME_READ_S = 1.0
"""A read that is denied asks again for its parts at once (readahead, then page by page): for so
long those get the same answer, or one read(2) would wait for several times ``miss_timeout``. Only
what failed after a wait is kept so: a full disk says so at once, and may soon have room again."""
RECENT_FAILURES = 4096
STOPPED_S = 0.1


class Road(Protocol):
    """Have these bytes here, verified (fetch.py)."""

    async def ensure(
        self, view: Digest, extent: Extent, *, demand: bool, deadline_s: float
    ) -> None: ...

    @property
    def request_bytes(self) -> int: ...

    def tally(self, view: Digest) -> Tally: ...


class Views(Protocol):
    """Which view is behind an inode number of the view directory."""

    async def by_inode(self, inode: int) -> Digest | None: ...

    async def length(self, view: Digest) -> int: ...

    async def perhaps_read(self) -> Sequence[Digest]:
        """The incomplete views that anybody has open: where an orphan's range may lie."""
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
        self._ahead = ReadAhead(road, ahead_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beginning: asyncio.Task[None] | None = None
        self._complaints = Complaints(clock)
        self.waiting = WaitingReads(clock, lambda view: road.tally(view).trouble or "being fetched")
        self.counts = MissCounts()

    def start(self) -> None:
        """Listen, and settle the orphans; in the background."""
        self._beginning = asyncio.create_task(self._begin(), name="settle orphans")
        self._beginning.add_done_callback(_say_why_not)

    async def _begin(self) -> None:
        orphans = list(self._guard.orphans)
        if orphans:
            log.warning("%d reads that an earlier daemon left waiting are taken up", len(orphans))
        await self._settle_all([orphan for orphan in orphans if not orphan.reserved])
        self._guard.read_ahead(self._ahead.most_bytes)
        self._guard.start()
        asyncio.get_running_loop().add_reader(self._guard.fileno(), self._collect)
        await self._settle_all([orphan for orphan in orphans if orphan.reserved])
        if orphans:
            log.warning("%d reads that an earlier daemon left waiting were answered", len(orphans))

    async def stop(self) -> None:
        """Stop listening; what is unanswered waits in the kernel for a successor."""
        await end_all([self._beginning])
        asyncio.get_running_loop().remove_reader(self._guard.fileno())
        await end_all(self._tasks)
        await self._ahead.close()
        self._guard.stop()
        self._complaints.close()
        self.waiting.close()

    async def _settle_all(self, orphans: Sequence[Orphan]) -> None:
        await asyncio.gather(*(self._settle(orphan) for orphan in orphans))

    async def _settle(self, orphan: Orphan) -> None:
        """Its range is filled in its view, or where that was not noted wherever it may lie.

        It is denied if that fails anywhere: rather an error than zeros. One orphan that cannot be
        settled keeps nobody else waiting.
        """
        try:
            answer = await self._fill(orphan)
        except Exception:
            log.exception("a read that an earlier daemon left waiting can't be served")
            answer = errno.EIO
        try:
            self._guard.settle(orphan, answer)
        except OSError as error:
            log.error("process %d waits on, its read can't be answered: %s", orphan.pid, error)

    async def _fill(self, orphan: Orphan) -> int:
        """0, or the errno that the orphan's reader gets."""
        if orphan.inode is None:
            views = list(await self._views.perhaps_read())
        else:
            view = await self._view_of(orphan)
            if view is None:
                return errno.EIO
            views = [view]

        async def fill(view: Digest) -> int | None:
            extent, failure = await self._clip(view, orphan.offset, orphan.length)
            return failure if extent is None else await self._have(view, extent)

        failures = await asyncio.gather(*map(fill, views))
        return next((failure for failure in failures if failure), 0)

    async def _clip(
        self, view: Digest, offset: int, length: int | None
    ) -> tuple[Extent | None, int | None]:
        """The range inside the view (None: nothing to fill), or the errno that its reader gets.

        Without a ``length`` it is all that follows.
        """
        try:
            end = await self._views.length(view)
        except Exception as error:
            self._complaints.add(f"view {view}", Extent(offset, length or 0), _told(error))
            return None, errno.EIO
        stop = end if length is None else min(offset + length, end)
        return (Extent(offset, stop - offset) if stop > offset else None), None

    def _collect(self) -> None:
        for miss in self._guard.misses():
            self._begin_task(self._answer(miss))
        for ahead in self._guard.aheads():
            self._begin_task(self._soon(ahead))
            self._guard.read_ahead(self._ahead.most_bytes)  # the link may be another by now

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, miss: Miss) -> None:
        self.counts.asked += 1
        began_s = self._clock.monotonic_s()
        view = await self._view_of(miss)
        if view is None:
            self.counts.failed += 1
            self._guard.deny(miss, errno.EIO)
            return
        extent, failure = await self._clip(view, miss.offset, miss.length)
        if extent is not None:
            if miss.ahead:  # planned in the same turn of the loop: one range brings both
                self._ahead.start(view, Extent(extent.end, miss.ahead))
            failure = await self._try(view, extent)
        waited_s = self._clock.monotonic_s() - began_s
        self.counts.waited_s += waited_s
        self.counts.longest_s = max(self.counts.longest_s, waited_s)
        if failure is None:
            self.counts.filled += 1
            self._guard.allow(miss)
            if extent is not None and not miss.ahead:
                behind, _ = await self._clip(view, extent.end, self._ahead.behind(miss))
                if behind is not None:
                    self._ahead.start(view, behind)
        else:
            self.counts.failed += 1
            self._guard.deny(miss, failure)

    async def _view_of(self, miss: Miss | Orphan) -> Digest | None:
        """Whose file it is; None, said in the log, if nobody's or if that can't be found out."""
        why = "no view is known by this file"
        try:
            view = await self._views.by_inode(miss.inode) if miss.inode else None
        except Exception as error:
            view, why = None, _told(error)
        if view is None:
            file = f"an unknown file (inode {miss.inode}, process {miss.pid})"
            self._complaints.add(file, Extent(miss.offset, miss.length or 0), why)
        return view

    async def _soon(self, ahead: Ahead) -> None:
        """A reader in order finds all that it asks for, and will not for long."""
        try:
            view = await self._views.by_inode(ahead.inode)
        except Exception as error:
            log.debug("reading ahead in file %d: %s", ahead.inode, _told(error))
            return
        if view is not None:
            self._ahead.start(view, Extent(ahead.offset, ahead.length))

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
            with self.waiting.during(view, extent):
                await self._ensure(view, extent)
        except NoSpaceError as error:
            self._complaints.add(f"view {view}", extent, str(error))
            return errno.ENOSPC
        except EmberError as error:
            self._complaints.add(f"view {view}", extent, str(error))
            return errno.EIO
        except Exception as error:
            self._complaints.add(f"view {view}", extent, _told(error))
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
            except (UnavailableError, ClosedError):
                if left_s <= STOPPED_S:
                    raise
                await self._clock.sleep(STOPPED_S)
            else:
                return


def _told(error: Exception) -> str:
    """For a line of the log; one that Ember did not raise on purpose is logged with its place."""
    if isinstance(error, (EmberError, OSError)):
        return str(error)
    log.error("answering a read failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _say_why_not(beginning: asyncio.Task[None]) -> None:
    error = None if beginning.cancelled() else beginning.exception()
    if error is not None:
        log.critical("readers wait, since the guard can't begin; restart Ember", exc_info=error)
