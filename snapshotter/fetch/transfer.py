"""One tier's bytes of one blob, through a decoder, into a view: verified chunk by chunk.

Invariant: a chunk is told about as soon as it can be read, and nothing that fails its digest is
written. Inflating, hashing and buffered writes run in threads, one at a time per transfer.
It does not know who waits, and tries once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from snapshotter.chunks.offload import offload, over
from snapshotter.chunks.view import View
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import (
    CorruptError,
    EmberError,
    NoSpaceError,
    restated,
)
from snapshotter.fetch.beginning import (
    Pieces,
    begin_without,
    is_window_perhaps_missing,
    nearest_before,
)
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.runs import Runs, opened
from snapshotter.fetch.slots import Ticket
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.fetch.windows import WindowLostError
from snapshotter.image.decode import Decoder, Span, plan
from snapshotter.tiers.tier import Tier

_AHEAD_BYTES = 1024 * 1024
_BATCH_BYTES = 256 * 1024
"""So much is decoded at once where nobody waits for a part of it."""
_LATER_CHUNKS = 64
_WRITE_CHUNKS = 16
_LINGER_S = 0.0003
"""How long a chunk that somebody waits for is kept to be told of together with its neighbours."""


@dataclass(slots=True)
class _Step:
    """What became of some chunks: those that are here (new or not), those without room, the end."""

    kept: list[tuple[int, bool]] = field(default_factory=list)
    full: list[tuple[int, bytes]] = field(default_factory=list)
    ended: bool = False
    error: EmberError | None = None


class Transfer:
    """Brings chunks of ``view``; ``arrived(n)`` is called on the loop for each that is here.

    ``is_wanted(n)``, asked from threads, says whether somebody waits for it just now.
    """

    def __init__(
        self,
        crew: Crew,
        view: View,
        ledger: Ledger,
        ticket: Ticket,
        arrived: Callable[[int], None],
        is_wanted: Callable[[int], bool],
    ) -> None:
        self.in_offset = 0
        """Compressed offset up to which the blob has come; tells how far off a chunk is."""
        self._crew = crew
        self._view = view
        self._ledger = ledger
        self._ticket = ticket
        self._arrived = arrived
        self._is_wanted = is_wanted
        self._came: Callable[[int], None] | None = None
        self._runs = Runs(view, crew.background_pool, ledger, arrived)
        self._coming: Iterator[tuple[int, bytes]] | None = None
        self._later: list[tuple[int, bytes]] = []
        self._inbox: list[bytes] = []
        self._inbox_bytes = 0
        self._taken = asyncio.Event()

    async def ranges(
        self,
        tier: Tier,
        source: LayerSource,
        blob: BlobRef,
        chunks: Sequence[int],
        came: Callable[[int], None] | None = None,
    ) -> None:
        """Fetch the ranges that give ``chunks``; what comes out on the way is kept too.

        ``came`` is told of the length of each piece. Raises what the tier raised, CorruptError for
        bytes that are not the layer's, NoSpaceError, or what the view's disk says.
        """
        self._came = came
        for span in plan(source.index, chunks, gap_bytes=self._crew.gap_bytes):
            try:
                await self._range(tier, *await self._begin(tier, source, blob, span))
            except WindowLostError as error:
                decoder = await offload(self._crew.demand_pool, nearest_before, source.index, span)
                self._crew.windows.complain(
                    source.index.layer,
                    f"is read from compressed byte {decoder.in_offset} on instead of"
                    f" {span.in_offset}, for want of a window of its index: {error}",
                )
                await self._range(tier, decoder, self._read(tier, blob, decoder.span))

    async def whole(self, tier: Tier, source: LayerSource, blob: BlobRef) -> None:
        """Stream the blob from its first byte and keep all that is missing; errors as ranges()."""
        index = source.index
        (span,) = plan(index, range(index.chunk_count))
        decoder = Decoder(index, span)
        self.in_offset = 0
        await self._pump(tier, decoder, tier.stream(blob, demand=self._ticket.demand))

    async def _begin(
        self, tier: Tier, source: LayerSource, blob: BlobRef, span: Span
    ) -> tuple[Decoder, Pieces]:
        """The decoder for ``span``, and what its own span says is to be fetched."""
        index, crew = source.index, self._crew
        decoder = crew.decoders.find(index, span)
        if decoder is None and is_window_perhaps_missing(source, span):
            return await begin_without(
                crew.windows,
                crew.demand_pool,
                source,
                span,
                lambda extent: tier.read(blob, extent, demand=self._ticket.demand),
                self._ledger,
                demand=self._ticket.demand,
            )
        decoder = decoder or Decoder(index, span)
        return decoder, self._read(tier, blob, decoder.span)

    def _read(self, tier: Tier, blob: BlobRef, span: Span) -> Pieces:
        extent = Extent(span.in_offset, span.length_bytes)
        return tier.read(blob, extent, demand=self._ticket.demand)

    async def _range(self, tier: Tier, decoder: Decoder, pieces: Pieces) -> None:
        self.in_offset = decoder.in_offset
        try:
            await self._pump(tier, decoder, pieces)
        except CorruptError:
            decoder.failed = True
            raise
        finally:
            self._crew.decoders.give(decoder)

    async def _pump(self, tier: Tier, decoder: Decoder, pieces: Pieces) -> None:
        """Decode what has come in a thread, while more is coming: no more than _AHEAD_BYTES.

        The thread is called when it has something to bring, not for each piece: going there and
        back takes longer than decoding a chunk.
        """
        work: asyncio.Task[None] | None = None
        come = decoder.in_offset
        measure = self._crew.link.measure() if self._ticket.demand else None
        self._runs.tier_name = tier.name
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._ledger.received(tier.name, len(piece), demand=self._ticket.demand)
                    self._crew.slots.heard(self._ticket)
                    if self._came is not None:
                        self._came(len(piece))
                    if measure is not None:
                        measure.piece(len(piece))
                    come += len(piece)
                    self.in_offset = come
                    full = self._inbox_bytes >= _AHEAD_BYTES
                    if full and work is not None and not work.done():
                        self._taken.clear()
                        await self._taken.wait()
                    if work is not None and work.done():
                        await work
                        work = None
                    if decoder.done:
                        continue  # read to its end, a connection can be used again
                    self._inbox.append(piece)
                    self._inbox_bytes += len(piece)
                    if work is None and come >= decoder.span.in_end:
                        await self._work(tier, decoder)
                    elif work is None and self._is_due(decoder, come):
                        work = asyncio.create_task(self._work(tier, decoder))
                    await self._crew.slots.give_way(self._ticket, self._crew.limits.yield_most_s)
            if measure is not None:
                measure.end()
            if work is not None:
                await work
            await self._runs.flush(decoder)
        except EmberError:
            await self._keep_what_came(tier, decoder, work)
            raise
        finally:
            if work is not None:
                work.cancel()
                await over(work)
                work = None  # its error comes through this frame
            await self._runs.drop(decoder)
            self._clear(decoder)

    def _is_due(self, decoder: Decoder, come: int) -> bool:
        """Whether a chunk that somebody waits for can be had from the inbox, or it is long."""
        if self._inbox_bytes >= _BATCH_BYTES:
            return True
        if not self._ticket.demand:
            return False
        index, first = decoder.index, decoder.next_chunk
        for number in range(first, min(first + _LATER_CHUNKS, decoder.span.last_chunk + 1)):
            if index.chunk_input_end(number) > come:
                return False
            if self._is_wanted(number):
                return True
        return False

    async def _keep_what_came(
        self, tier: Tier, decoder: Decoder, work: asyncio.Task[None] | None
    ) -> None:
        """The tier broke off; or the decoder did, and then nothing more comes out of it."""
        if work is not None:
            await asyncio.wait({work})
        elif self._inbox and not decoder.failed and not decoder.done:
            with contextlib.suppress(EmberError):
                await self._work(tier, decoder)
        if not decoder.failed:
            with contextlib.suppress(EmberError):
                await self._runs.flush(decoder)

    def _clear(self, decoder: Decoder) -> None:
        if self._coming is not None:  # left half-way: the decoder is of no use any more
            decoder.failed = True
            self._coming = None
        self._inbox, self._inbox_bytes = [], 0
        self._later.clear()

    async def _work(self, tier: Tier, decoder: Decoder) -> None:
        """Decode and keep what is in the inbox until it is empty."""
        try:
            while True:
                if self._ticket.demand and not self._runs.is_empty:
                    self._coming = _decode(decoder, await self._runs.hand_over(decoder))
                if (self._coming is None and not self._runs.is_more) or decoder.done:
                    batch, self._inbox, self._inbox_bytes = self._inbox, [], 0
                    self._taken.set()
                    if batch and not decoder.done:
                        self._begin_on(decoder, batch)
                if self._runs.is_more:
                    await self._runs.step(decoder)
                elif self._coming is not None or self._later:
                    await self._keep_urgently(tier)
                else:
                    return
        finally:
            self._taken.set()

    def _begin_on(self, decoder: Decoder, batch: Sequence[bytes]) -> None:
        """Who waits gets each chunk at once; else whole runs are written past the page cache."""
        if self._ticket.demand:
            self._coming = _decode(decoder, batch)
        else:
            self._runs.add(batch)

    async def _keep_urgently(self, tier: Tier) -> None:
        """For readers: some chunks more, written through the page cache and told of."""
        step = await offload(self._crew.demand_pool, self._step, self._coming or iter(()))
        if step.ended:
            self._coming = None
        for number, fresh in step.kept:
            self._told(tier, number, fresh)
        if step.kept:  # let them go on before the thread is back and wants the interpreter
            await asyncio.sleep(0)
        self._view.settle()
        for number, data in step.full:
            self._told(tier, number, await self._view.write(number, data, demand=True))
        if step.error is not None:
            raise restated(step.error)

    def _step(self, coming: Iterator[tuple[int, bytes]]) -> _Step:
        """In a thread: decode, verify, write; first what somebody waits for.

        The thread goes back to the loop soon after such a chunk is here, since the loop could not
        tell anybody while the thread goes on: it would have to wait for the interpreter's lock.
        The other chunks are written when nobody waits or nothing is left to decode.
        """
        step, later, due_s = _Step(), self._later, math.inf
        try:
            for number, data in coming:
                if self._is_wanted(number):
                    self._put(number, data, step)
                    due_s = min(due_s, time.monotonic() + _LINGER_S)
                else:
                    later.append((number, data))
                if time.monotonic() >= due_s:
                    return step
                if len(later) >= _LATER_CHUNKS:
                    break
            else:
                step.ended = True
            if math.isinf(due_s) and (len(later) >= _LATER_CHUNKS or not self._inbox):
                some, self._later = later[:_WRITE_CHUNKS], later[_WRITE_CHUNKS:]
                for number, data in some:
                    self._put(number, data, step)
        except EmberError as error:
            step.error = restated(error)
        return step

    def _put(self, number: int, data: bytes, step: _Step) -> None:
        try:
            step.kept.append((number, self._view.put(number, data)))
        except NoSpaceError:
            step.full.append((number, data))

    def _told(self, tier: Tier, number: int, fresh: bool) -> None:
        self._ledger.kept(tier.name, int(fresh), demand=True)
        self._arrived(number)


def _decode(decoder: Decoder, batch: Sequence[bytes | memoryview]) -> Iterator[tuple[int, bytes]]:
    """The chunks that come out of ``batch``, each as soon as it is whole."""
    opened(decoder)
    for piece in batch:
        yield from decoder.chunks(piece)
