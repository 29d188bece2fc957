"""Bringing a whole view: what is missing window by window, then what is in doubt read back.

Several windows may be under way at once, each a ranged fetch of its own. They are cut where
decoding can begin, so that no byte is fetched or inflated for two of them. All of it takes the
road, behind everything else; what has come stays, whenever it is stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from snapshotter.chunks.datafile import ClosedError
from snapshotter.chunks.view import View
from snapshotter.clock import Clock
from snapshotter.content import Extent
from snapshotter.errors import UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.tasks import together

_PROVE_CHUNKS = 64
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a view is filled: ``at_once`` windows of ``window_bytes`` plain bytes each.

    ``bytes_per_s``: plain bytes a second at most, with one window at a time; None: as they come.
    """

    window_bytes: int
    at_once: int = 1
    bytes_per_s: int | None = None


class Fill:
    """One filling of one view; ``ensure`` is the road's, ``is_open`` says whether it still is."""

    def __init__(
        self,
        view: View,
        index: LayerIndex | None,
        speed: Speed,
        clock: Clock,
        ensure: Callable[[Extent], Awaitable[None]],
        is_open: Callable[[], bool],
        is_stopped: Callable[[], bool],
    ) -> None:
        """``is_stopped``: the road works for this view no more, since somebody lets go of it."""
        self._view = view
        self._index = index
        self._speed = speed
        self._clock = clock
        self._ensure = ensure
        self._is_open = is_open
        self._is_stopped = is_stopped

    async def run(self) -> None:
        """Return when all is here and durable, or the view was closed; raises as Road.ensure."""
        view = self._view
        for _ in range(_ROUNDS):
            await self._bring()
            if self._is_open():
                await view.flush()
            if not await self._prove():
                return
        raise UnavailableError(
            f"{view.path}: what is written there comes back wrong; check this disk"
        )

    async def _bring(self) -> None:
        windows = self._windows()
        at_once = self._speed.at_once
        await together([partial(self._work, windows)] * at_once, at_once)

    def _windows(self) -> Iterator[Extent]:
        """What to ask for, in order; each begins where decoding can."""
        start = 0
        while start < self._view.length_bytes:
            end = self._cut(start + self._speed.window_bytes)
            yield Extent(start, end - start)
            start = end

    def _cut(self, end: int) -> int:
        """The first chunk that the last checkpoint before ``end`` gives, if that is not far."""
        if self._index is None or end >= self._view.length_bytes:
            return end
        size = self._view.chunk_bytes
        if not self._index.checkpoint_count:
            return end
        begins = -(-self._index.nearest_checkpoint(end).out_offset // size) * size
        return begins if end - begins < self._speed.window_bytes // 2 else end

    async def _work(self, windows: Iterator[Extent]) -> None:
        for window in windows:
            if not self._is_open():
                return
            missing = len(self._view.missing(window))
            if not missing:
                continue
            started_s = self._clock.monotonic_s()
            try:
                await self._ensure(window)
            except (UnavailableError, ClosedError) as error:
                if not self._is_stopped() and not isinstance(error, ClosedError):
                    raise
                return
            await self._rest(started_s, missing * self._view.chunk_bytes)

    async def _prove(self) -> bool:
        """Read back all that is in doubt; whether some of it was lost."""
        lost = 0
        while self._is_open() and self._view.unproved():
            started_s = self._clock.monotonic_s()
            report = await self._view.prove(_PROVE_CHUNKS)
            if not report.proved and not report.lost:
                break
            lost += report.lost
            count = report.proved + report.lost
            await self._rest(started_s, count * self._view.chunk_bytes)
        return lost > 0

    async def _rest(self, started_s: float, done_bytes: int) -> None:
        if self._speed.bytes_per_s:
            spent_s = self._clock.monotonic_s() - started_s
            await self._clock.sleep(max(0.0, done_bytes / self._speed.bytes_per_s - spent_s))
