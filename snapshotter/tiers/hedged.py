"""Asks a second time for a read that is slow, elsewhere if there is an elsewhere; the first wins.

A connection that hangs or a mirror that is silent so costs each read that meets it one delay, and
those that do not nothing. Background reads are hedged too: a reader may wait for one by now. Whole
streams are not: they are taken up where they broke, by whoever reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from snapshotter.clock import Clock, Timer
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import EmberError, restated
from snapshotter.tiers.latency import HedgeLimits, Latencies, Latency
from snapshotter.tiers.tier import Tier

Pieces = AsyncGenerator[bytes, None]


class HedgedTier:
    """A tier over one; ``elsewhere`` is the same one, which asks another place first."""

    def __init__(
        self,
        inner: Tier,
        elsewhere: Tier,
        clock: Clock,
        limits: HedgeLimits | None = None,
        *,
        lagging: Callable[[BlobRef], None] = lambda blob: None,
        again: Callable[[], None] = lambda: None,
    ) -> None:
        """``lagging``: called when the place that is asked first for a blob is silent each time;
        ``again`` for every second ask."""
        self.name = inner.name
        self._inner = inner
        self._elsewhere = elsewhere
        self._clock = clock
        self._lagging = lagging
        self._asked_again = again
        self._latencies = Latencies(limits or HedgeLimits())

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> Pieces:
        return self._read(blob, extent, demand)

    def stream(self, blob: BlobRef, *, demand: bool) -> Pieces:
        return self._inner.stream(blob, demand=demand)

    def suspect(self, blob: BlobRef) -> None:
        self._inner.suspect(blob)

    async def _read(self, blob: BlobRef, extent: Extent, demand: bool) -> Pieces:
        def again(done: int) -> Pieces:
            self._asked_again()
            rest = Extent(extent.offset + done, extent.length - done)
            return self._elsewhere.read(blob, rest, demand=demand)

        latency = self._latencies.of(blob.repository)
        pieces = self._inner.read(blob, extent, demand=demand)
        race = _Race(pieces, extent.length, again, latency, self._clock)
        try:
            while (piece := await race.next()) is not None:
                yield piece
                if race.lost and latency.lost(race.era):
                    self._lagging(blob)
                race.lost = False
        finally:
            await race.close()


class _Race:
    """One read and, while it is slow, the second one. Each `next` gives what comes first."""

    def __init__(
        self,
        pieces: Pieces,
        length: int,
        again: Callable[[int], Pieces],
        latency: Latency,
        clock: Clock,
    ) -> None:
        self._main = pieces
        self._second: _Second | None = None
        self._given_up = False
        """The second one failed: no third."""
        self._over: list[_Second] = []
        self._length = length
        self._done = 0
        self._again = again
        self._latency = latency
        self._clock = clock
        self._timer: Timer | None = None
        self._limit: asyncio.Timeout | None = None
        self._began_s = 0.0
        self.lost = False
        """The second one was there before the first had sent anything."""
        self.era = latency.began()

    async def next(self) -> bytes | None:
        """The next piece; None at the end. Raises what the last of the two that is left raised."""
        self._began_s = self._clock.monotonic_s()
        try:
            piece = await self._race()
        finally:
            self._disarm()
        if piece is not None:
            self._latency.took(self._clock.monotonic_s() - self._began_s, first=not self._done)
            self._done += len(piece)
        return piece

    async def close(self) -> None:
        """Both end; their connections are let go of."""
        self._drop_second()
        for second in self._over:
            await second.close()
        await self._main.aclose()

    async def _race(self) -> bytes | None:
        if self._done >= self._length:  # it only has to end
            return await anext(self._main, None)
        self._arm()
        try:
            async with asyncio.timeout(None) as self._limit:
                piece = await anext(self._main)
        except StopAsyncIteration:
            return None
        except TimeoutError:  # the second one is there first
            if self._second is None:
                raise
            self.lost = not self._done
            return await self._change_over(None)
        except EmberError as error:
            if self._second is None:
                raise
            return await self._change_over(restated(error))
        finally:
            self._limit = None
        if not self._done:
            self._latency.won(self.era)
        self._drop_second()
        return piece

    async def _change_over(self, error: EmberError | None) -> bytes | None:
        """The second one is the only one from now on."""
        second = self._second
        assert second is not None
        self._second = None
        self._began_s = second.began_s  # what a read takes, not what it takes to find out
        self._latency.hedge_over()
        await self._main.aclose()
        self._main = second.pieces
        try:
            return await second.first()
        except EmberError:
            if error is None:
                raise
            raise error from None

    def _arm(self) -> None:
        """Ask again once this is slow."""
        if self._second is None and not self._given_up:
            slow_s = self._latency.slow_s(first=not self._done)
            self._timer = self._clock.call_later(slow_s, self._slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _slow(self) -> None:
        self._timer = None
        if not self._latency.may_hedge():
            self._timer = self._clock.call_later(self._latency.soon_s, self._slow)
            return
        now_s = self._clock.monotonic_s()
        self._second = _Second(self._again(self._done), now_s, self._second_here)

    def _second_here(self, failed: bool) -> None:
        if failed:
            self._given_up = True
            self._drop_second()
        elif self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _drop_second(self) -> None:
        if self._second is not None:
            second, self._second = self._second, None
            second.cancel()
            self._over.append(second)
            self._latency.hedge_over()


class _Second:
    """The second ask, up to its first piece; ``here`` is called with whether it failed."""

    def __init__(self, pieces: Pieces, began_s: float, here: Callable[[bool], None]) -> None:
        self.pieces = pieces
        self.began_s = began_s
        self._here = here
        self._task = asyncio.create_task(self._begin(), name="asked again")
        self._task.add_done_callback(self._told)

    async def _begin(self) -> bytes | None:
        return await anext(self.pieces, None)

    def _told(self, task: asyncio.Task[bytes | None]) -> None:
        if not task.cancelled():
            self._here(task.exception() is not None or task.result() is None)

    async def first(self) -> bytes | None:
        """Its first piece; raises why there is none."""
        return await self._task

    def cancel(self) -> None:
        """It lost; close() comes later."""
        self._task.cancel()

    async def close(self) -> None:
        """Let go of its connection."""
        self._task.cancel()
        if not self._task.done():
            await asyncio.wait({self._task})
        await self.pieces.aclose()
