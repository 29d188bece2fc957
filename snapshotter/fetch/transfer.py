"""One tier's bytes of one blob, through a decoder, into a view: verified chunk by chunk.

Invariant: a chunk is told about as soon as it can be read, and nothing that fails its digest is
written. Inflating, hashing and buffered writes run in threads, one at a time per transfer.
It does not know who waits, and tries once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice

from snapshotter.chunks.offload import offload, over
from snapshotter.chunks.view import View
from snapshotter.content import BlobRef, Compression, Extent
from snapshotter.errors import (
    CorruptError,
    EmberError,
    NoSpaceError,
    NotFoundError,
    RefusedError,
    restated,
)
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.slots import Ticket
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.image.decode import Decoder, Span, plan
from snapshotter.image.index import LayerIndex
from snapshotter.tiers.tier import Tier

log = logging.getLogger(__name__)

_AHEAD_BYTES = 1024 * 1024
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
        """Compressed offset up to which the blob was decoded; tells how far off a chunk is."""
        self._crew = crew
        self._view = view
        self._ledger = ledger
        self._ticket = ticket
        self._arrived = arrived
        self._is_wanted = is_wanted
        self._held: list[tuple[int, bytes]] = []
        self._coming: Iterator[tuple[int, bytes]] | None = None
        self._later: list[tuple[int, bytes]] = []
        self._inbox: list[bytes] = []
        self._inbox_bytes = 0
        self._taken = asyncio.Event()

    async def ranges(
        self, tier: Tier, source: LayerSource, blob: BlobRef, chunks: Sequence[int]
    ) -> None:
        """Fetch the ranges that give ``chunks``; what comes out on the way is kept too.

        Raises what the tier raised, CorruptError for bytes that are not the layer's, NoSpaceError,
        or what the view's disk says.
        """
        for span in plan(source.index, chunks, gap_bytes=self._crew.limits.gap_bytes):
            decoder = await self._begin(source.index, span)
            self.in_offset = decoder.in_offset
            extent = Extent(decoder.in_offset, decoder.span.in_end - decoder.in_offset)
            try:
                pieces = tier.read(blob, extent, demand=self._ticket.demand)
                await self._pump(tier, decoder, pieces)
            except CorruptError:
                decoder.failed = True
                raise
            finally:
                self._held.clear()
                self._crew.decoders.give(decoder)

    async def whole(self, tier: Tier, source: LayerSource, blob: BlobRef) -> None:
        """Stream the blob from its first byte and keep all that is missing; errors as ranges()."""
        index = source.index
        (span,) = plan(index, range(index.chunk_count))
        decoder = await offload(self._pool, Decoder, index, span)
        self.in_offset = 0
        try:
            await self._pump(tier, decoder, tier.stream(blob, demand=self._ticket.demand))
        finally:
            self._held.clear()

    @property
    def _pool(self) -> Executor:
        crew = self._crew
        return crew.demand_pool if self._ticket.demand else crew.background_pool

    async def _begin(self, index: LayerIndex, span: Span) -> Decoder:
        if index.compression is Compression.PLAIN:  # nothing to read or to set up
            return self._crew.decoders.take(index, span)
        return await offload(self._pool, self._decoder, index, span)

    def _decoder(self, index: LayerIndex, span: Span) -> Decoder:
        try:
            return self._crew.decoders.take(index, span)
        except (NotFoundError, RefusedError) as error:
            log.error("reading %s from its beginning: %s", index.layer, error)
            whole = replace(span, in_offset=0, checkpoint=0, first_chunk=0)
            return Decoder(index, whole)

    async def _pump(
        self, tier: Tier, decoder: Decoder, pieces: AsyncGenerator[bytes, None]
    ) -> None:
        """Decode what has come in a thread, while more is coming: no more than _AHEAD_BYTES."""
        work: asyncio.Task[None] | None = None
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._ledger.received(tier.name, len(piece), demand=self._ticket.demand)
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
                    if work is None:
                        work = asyncio.create_task(self._work(tier, decoder))
                    await self._crew.slots.give_way(self._ticket, self._crew.limits.yield_most_s)
            if work is not None:
                await work
            await self._write_held(tier)
        except EmberError:
            if work is not None:  # what came before the tier broke off is kept
                await asyncio.wait({work})
            raise
        finally:
            if work is not None:
                work.cancel()
                await over(work)
                work = None  # its error comes through this frame
            self._clear(decoder)

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
                if self._coming is None or decoder.done:
                    batch, self._inbox, self._inbox_bytes = self._inbox, [], 0
                    self._taken.set()
                    if batch and not decoder.done:
                        self._coming = _decode(decoder, batch)
                if self._coming is None and not self._later:
                    return
                if self._ticket.demand:
                    await self._keep_urgently(tier)
                else:
                    await self._gather(tier)
                self.in_offset = decoder.in_offset
        finally:
            self._taken.set()

    async def _gather(self, tier: Tier) -> None:
        """In the background: some chunks more, written when there are enough for a run."""
        coming, most = self._coming or iter(()), self._crew.limits.write_run_chunks
        some = await offload(self._crew.background_pool, lambda: list(islice(coming, most)))
        if len(some) < most:
            self._coming = None
        self._held += some
        if len(self._held) >= most:
            await self._write_held(tier)

    async def _keep_urgently(self, tier: Tier) -> None:
        """For readers: some chunks more, written through the page cache and told of."""
        await self._write_held(tier)
        step = await offload(self._crew.demand_pool, self._step, self._coming or iter(()))
        if step.ended:
            self._coming = None
        for number, fresh in step.kept:
            self._told(tier, number, fresh)
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

    async def _write_held(self, tier: Tier) -> None:
        """Write what a background transfer has gathered, in runs of neighbours."""
        held, self._held = self._held, []
        at = 0
        while at < len(held):
            first = held[at][0]
            run = [held[at][1]]
            while at + len(run) < len(held) and held[at + len(run)][0] == first + len(run):
                run.append(held[at + len(run)][1])
            kept = await self._view.write_run(first, run, demand=self._ticket.demand)
            self._ledger.kept(tier.name, kept, demand=False)
            for number in range(first, first + len(run)):
                self._arrived(number)
            at += len(run)


def _decode(decoder: Decoder, batch: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """The chunks that come out of ``batch``, each as soon as it is whole."""
    for piece in batch:
        yield from decoder.chunks(piece)
