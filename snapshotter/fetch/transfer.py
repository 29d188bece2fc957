"""One tier's bytes of one blob, through a decoder, into a view: verified chunk by chunk.

Invariant: a chunk is told about as soon as it can be read, and nothing that fails its digest is
written. Inflating, hashing and buffered writes run in threads, one at a time per transfer.
It does not know who waits, and tries once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from snapshotter.chunks.offload import offload, over
from snapshotter.chunks.view import View
from snapshotter.content import BlobRef, Compression, Extent
from snapshotter.errors import CorruptError, EmberError, NoSpaceError, NotFoundError, RefusedError
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.slots import Ticket
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.image.decode import Decoder, Span, plan
from snapshotter.image.index import LayerIndex
from snapshotter.tiers.tier import Tier

log = logging.getLogger(__name__)

_PIECE_BYTES = 32 * 1024
_AHEAD_BYTES = 1024 * 1024


@dataclass(slots=True)
class _BatchPut:
    """What became of a batch: chunks (new or not) not told of yet, those without room, the end."""

    quiet: list[tuple[int, bool]] = field(default_factory=list)
    full: list[tuple[int, bytes]] = field(default_factory=list)
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
        self._inbox: list[bytes] = []
        self._inbox_bytes = 0

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
                if extent.length > 0:
                    pieces = tier.read(blob, extent, demand=self._ticket.demand)
                    await self._pump(tier, decoder, pieces)
                else:
                    await self._consume(tier, decoder, [b""])  # all it needs was read before
                    await self._write_held(tier)
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
                    if work is not None and (work.done() or self._inbox_bytes >= _AHEAD_BYTES):
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
        finally:
            if work is not None:
                work.cancel()
                await over(work)
            self._inbox, self._inbox_bytes = [], 0

    async def _work(self, tier: Tier, decoder: Decoder) -> None:
        """Consume the inbox until it is empty."""
        while self._inbox and not decoder.done:
            batch, self._inbox, self._inbox_bytes = self._inbox, [], 0
            await self._consume(tier, decoder, batch)
            self.in_offset = decoder.in_offset

    async def _consume(self, tier: Tier, decoder: Decoder, batch: Sequence[bytes]) -> None:
        if not self._ticket.demand:
            self._held += await offload(
                self._crew.background_pool, lambda: list(_decode(decoder, batch))
            )
            if len(self._held) >= self._crew.limits.write_run_chunks:
                await self._write_held(tier)
            return
        await self._write_held(tier)
        loop, told = asyncio.get_running_loop(), partial(self._told, tier.name)

        def tell(number: int, fresh: bool) -> None:
            loop.call_soon_threadsafe(told, number, fresh)

        batch_put = await offload(
            self._crew.demand_pool, self._decode_and_put, decoder, batch, tell
        )
        for number, fresh in batch_put.quiet:
            self._told(tier.name, number, fresh)
        self._view.settle()
        for number, data in batch_put.full:
            fresh = await self._view.write(number, data, demand=True)
            self._told(tier.name, number, fresh)
        if batch_put.error is not None:
            raise batch_put.error

    def _decode_and_put(
        self, decoder: Decoder, batch: Sequence[bytes], tell: Callable[[int, bool], object]
    ) -> _BatchPut:
        """In a thread: decode, verify, write.

        Who waits for a chunk is told at once; the others are left to the end of the batch, since
        each wake-up costs both threads the time of a chunk.
        """
        result = _BatchPut()
        try:
            for number, data in _decode(decoder, batch):
                try:
                    fresh = self._view.put(number, data)
                except NoSpaceError:
                    result.full.append((number, data))
                    continue
                if self._is_wanted(number):
                    tell(number, fresh)
                else:
                    result.quiet.append((number, fresh))
        except EmberError as error:
            result.error = error
        return result

    def _told(self, tier_name: str, number: int, fresh: bool) -> None:
        self._ledger.kept(tier_name, int(fresh), demand=True)
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
        rest = memoryview(piece)
        while not decoder.done:
            yield from decoder.feed(rest[:_PIECE_BYTES])
            rest = rest[_PIECE_BYTES:]
            if not rest:
                break
