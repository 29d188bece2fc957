"""The inflate windows that a decoder wants and that are not here: fetched, verified, kept.

Rule of ranges: what is wanted in one turn of the loop, or while all requests for the layer are
out, goes together in one, as far as no more than GAP_BYTES lie between two; a file of WHOLE_BYTES
comes whole. Who wants what is coming joins. Nothing counts that fails its digest in the index; what
is right goes into the windows file, or is remembered where that has no room. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from snapshotter.chunks.offload import offload, over
from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import (
    CorruptError,
    EmberError,
    NoSpaceError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
    restated,
)
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.image.index import Checkpoint, LayerIndex
from snapshotter.tiers.tier import Tier

log = logging.getLogger(__name__)

V = TypeVar("V")

GAP_BYTES = 16 * 1024
WHOLE_BYTES = 64 * 1024
RANGE_BYTES = 256 * 1024
AT_ONCE = 4
"""Requests for the windows of one layer at a time."""
MOST_FAILURES = 3
"""So often in a row a layer's windows may be out of reach before one goes on without."""
GIVEN_UP_S = 60.0
REMEMBERED_BYTES = 8 * 1024 * 1024
_LAYERS = 1024


class WindowLostError(EmberError):
    """Nobody has this window: decode from elsewhere."""


@dataclass(slots=True, eq=False)
class _Want:
    """One window that is on its way, and how many wait for it."""

    point: Checkpoint
    future: asyncio.Future[bytes]
    waiters: int = 0
    batch: _Batch | None = None

    @property
    def end(self) -> int:
        return self.point.window_offset + self.point.window_stored_bytes


@dataclass(slots=True, eq=False)
class _Batch:
    """Windows that come with one range."""

    wants: list[_Want]
    extent: Extent
    task: asyncio.Task[EmberError | None] | None = None


@dataclass(slots=True)
class _Layer:
    """What is under way for one layer, as the one who asked last knows it."""

    source: LayerSource
    ledger: Ledger
    demand: bool
    wants: dict[int, _Want] = field(default_factory=dict)
    running: list[_Batch] = field(default_factory=list)
    starting: bool = False


class Windows:
    """The windows of all layers. A cancelled caller leaves nothing running that nobody else wants.

    ``tiers``: whom to ask, best first. ``pool`` hashes and writes.
    """

    def __init__(self, tiers: Callable[[], Sequence[Tier]], pool: Executor, clock: Clock) -> None:
        self._tiers = tiers
        self._pool = pool
        self._clock = clock
        self._layers: dict[Digest, _Layer] = {}
        self._remembered: OrderedDict[tuple[Digest, int], bytes] = OrderedDict()
        self._remembered_bytes = 0
        self._failures: OrderedDict[Digest, int] = OrderedDict()
        self._complained: OrderedDict[Digest, float] = OrderedDict()
        self._given_up: OrderedDict[Digest, tuple[float, str]] = OrderedDict()

    def is_vain(self, source: LayerSource) -> bool:
        """Whether have() would ask nobody just now: they have been asked, in vain."""
        until_s, _ = self._given_up.get(source.index.layer, (0.0, ""))
        return self._clock.monotonic_s() < until_s

    def complain(self, layer: Digest, fault: str) -> None:
        """Name what it costs that a window is lost: once in a while for each layer."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._complained.get(layer, now_s):
            log.error("layer %s %s", layer, fault)
            self._complained[layer] = now_s + GIVEN_UP_S
            _bound(self._complained)

    async def have(
        self, source: LayerSource, point: Checkpoint, ledger: Ledger, *, demand: bool
    ) -> bytes:
        """The window of ``point`` as it is stored, verified.

        WindowLostError when nobody has it right, or nobody gave it several times in a row; before
        that what the tiers raised.
        """
        name = source.index.layer
        remembered = self._remembered.get((name, point.number))
        if remembered is not None:
            return remembered
        if not source.windows:
            raise WindowLostError("no registry is known that has its windows")
        if self.is_vain(source):
            raise WindowLostError(self._given_up[name][1])
        layer = self._layers.setdefault(name, _Layer(source, ledger, demand))
        layer.source, layer.ledger, layer.demand = source, ledger, layer.demand or demand
        want = layer.wants.get(point.number)
        if want is None:
            future = asyncio.get_running_loop().create_future()
            want = layer.wants[point.number] = _Want(point, future)
            if not _comes_along(layer, want):
                self._start_soon(layer)
        want.waiters += 1
        try:
            return await asyncio.shield(want.future)
        except EmberError as error:
            raise restated(error) from None
        finally:
            want.waiters -= 1
            if not want.waiters and not want.future.done():
                await self._abandon(layer, want)

    async def _abandon(self, layer: _Layer, want: _Want) -> None:
        """Nobody waits for ``want`` any more."""
        if layer.wants.get(want.point.number) is want:
            del layer.wants[want.point.number]
        want.future.cancel()
        batch = want.batch
        if batch is None:
            self._end(layer)
        elif batch.task is not None and not any(other.waiters for other in batch.wants):
            batch.task.cancel()
            await over(batch.task)

    def _start_soon(self, layer: _Layer) -> None:
        """What is wanted in one turn of the loop goes together."""
        if not layer.starting:
            layer.starting = True
            asyncio.get_running_loop().call_soon(self._start, layer)

    def _start(self, layer: _Layer) -> None:
        layer.starting = False
        while len(layer.running) < AT_ONCE:
            waiting = [want for want in layer.wants.values() if want.batch is None]
            if not waiting:
                break
            batch = _batch(layer.source.index, waiting)
            for want in batch.wants:
                want.batch = batch
            layer.running.append(batch)
            batch.task = asyncio.create_task(self._fetch(layer, batch))
            batch.task.add_done_callback(partial(self._ended, layer, batch))
        self._end(layer)

    def _end(self, layer: _Layer) -> None:
        name = layer.source.index.layer
        idle = not (layer.wants or layer.running or layer.starting)
        if idle and self._layers.get(name) is layer:
            del self._layers[name]

    def _ended(self, layer: _Layer, batch: _Batch, task: asyncio.Task[EmberError | None]) -> None:
        """The batch is over: who still waits gets to know why; the next may begin."""
        layer.running.remove(batch)
        error: EmberError | None
        if task.cancelled():
            error = UnavailableError("fetching a window was stopped")
        elif task.exception() is not None:
            log.error("fetching windows broke", exc_info=task.exception())
            error = UnavailableError("fetching a window broke; see the log")
        else:
            error = task.result()
        for want in batch.wants:
            if error is None and want.waiters and not want.future.done():
                want.batch = None  # it came too late for this one
                continue
            if layer.wants.get(want.point.number) is want:
                del layer.wants[want.point.number]
            if error is not None and want.waiters and not want.future.done():
                want.future.set_exception(error)
        self._start_soon(layer)

    async def _fetch(self, layer: _Layer, batch: _Batch) -> EmberError | None:
        """Bring what ``batch`` wants; why not all of it came, if so."""
        source, name = layer.source, layer.source.index.layer
        lasting = ""
        passing: EmberError | None = None
        for tier in self._tiers():
            for blob in source.windows:
                try:
                    await self._ask(layer, batch, tier, blob)
                except RangeUnsupportedError as error:
                    passing = restated(error)
                except CorruptError as error:
                    tier.suspect(blob)
                    lasting = f"{tier.name}: {error}"
                except NotFoundError as error:
                    lasting = f"{tier.name}: {error}"
                except EmberError as error:
                    passing = restated(error)
                else:
                    self._failures.pop(name, None)
                    return None
        failures = self._failures[name] = self._failures.pop(name, 0) + 1
        _bound(self._failures)
        if passing is not None and failures < MOST_FAILURES:
            return passing
        why = lasting if passing is None else f"{passing} ({failures} times in a row)"
        self._given_up[name] = (self._clock.monotonic_s() + GIVEN_UP_S, why)
        _bound(self._given_up)
        return WindowLostError(why)

    async def _ask(self, layer: _Layer, batch: _Batch, tier: Tier, blob: BlobRef) -> None:
        """One request; CorruptError if a window in it is not what the index says."""
        index, demand = layer.source.index, layer.demand
        if blob.size_bytes != index.windows_bytes:
            raise NotFoundError(f"{blob.digest} has {blob.size_bytes} bytes, not the windows'")
        data = bytearray()
        async with aclosing(tier.read(blob, batch.extent, demand=demand)) as pieces:
            async for piece in pieces:
                layer.ledger.received_windows(tier.name, len(piece))
                data += piece
        wanted = [want.point.number for want in batch.wants if not want.future.done()]
        found, unkept = await offload(self._pool, _take, index, batch.extent, bytes(data), wanted)
        for number, stored in unkept.items():
            self._remember(index.layer, number, stored)
        wrong = 0
        for want in batch.wants:
            right = found.get(want.point.number)
            if right is not None and not want.future.done():
                want.future.set_result(right)
            wrong += not want.future.done()
        if wrong:
            raise CorruptError(f"{wrong} windows in {blob.digest} are not those of the index")

    def _remember(self, layer: Digest, number: int, stored: bytes) -> None:
        if not self._remembered:
            log.warning("no room for the windows of %s: they stay in memory, a few", layer)
        before = self._remembered.pop((layer, number), b"")
        self._remembered[layer, number] = stored
        self._remembered_bytes += len(stored) - len(before)
        while self._remembered_bytes > REMEMBERED_BYTES:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_bytes -= len(oldest)


def _batch(index: LayerIndex, waiting: Sequence[_Want]) -> _Batch:
    """The one that waits longest, and those near to it."""
    if index.windows_bytes <= WHOLE_BYTES:
        return _Batch(list(waiting), Extent(0, index.windows_bytes))
    group: list[_Want] = []
    for want in sorted(waiting, key=lambda one: one.point.window_offset):
        begin = group[0].point.window_offset if group else want.point.window_offset
        near = not group or want.point.window_offset <= group[-1].end + GAP_BYTES
        if not near or want.end - begin > RANGE_BYTES:
            if waiting[0] in group:
                break
            group = []
        group.append(want)
    begin = group[0].point.window_offset
    return _Batch(group, Extent(begin, group[-1].end - begin))


def _comes_along(layer: _Layer, want: _Want) -> bool:
    """Whether a range that is on its way has the window too: then it is that one's."""
    for batch in layer.running:
        if batch.extent.offset <= want.point.window_offset and want.end <= batch.extent.end:
            want.batch = batch
            batch.wants.append(want)
            return True
    return False


def _take(
    index: LayerIndex, extent: Extent, data: bytes, wanted: Iterable[int]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """In a thread: the right windows in ``data``, all but those without room in the file kept.

    The first and the last that are wanted bound those that are looked at; a whole file has few.
    """
    wanted = list(wanted)
    whole = extent.length == index.windows_bytes
    numbers = range(index.checkpoint_count) if whole else range(min(wanted), max(wanted) + 1)
    found: dict[int, bytes] = {}
    unkept: dict[int, bytes] = {}
    for number in numbers:
        point = index.checkpoint(number)
        begin = point.window_offset - extent.offset
        stored = data[begin : begin + point.window_stored_bytes]
        if not stored or not index.is_window(point, stored):
            continue
        found[number] = stored
        try:
            index.keep_window(point, stored)
        except (NoSpaceError, UnavailableError):
            unkept[number] = stored
    return found, unkept


def _bound(kept: OrderedDict[Digest, V]) -> None:
    while len(kept) > _LAYERS:
        kept.popitem(last=False)
