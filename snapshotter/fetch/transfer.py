"""One tier's bytes of one blob, through a decoder, into a view: verified chunk by chunk.

Invariant: a chunk is told about as soon as it can be read, and nothing that fails its digest is
written. Inflating, hashing and buffered writes run in threads; one piece at a time per transfer.
It does not know who waits, and tries once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace

from snapshotter.chunks.offload import offload
from snapshotter.chunks.view import View
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import CorruptError, NoSpaceError, NotFoundError, RefusedError
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.slots import Ticket
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.image.decode import Decoder, Span, plan
from snapshotter.image.index import LayerIndex
from snapshotter.tiers.tier import Tier

log = logging.getLogger(__name__)

_PIECE_BYTES = 32 * 1024


class Transfer:
    """Brings chunks of ``view``; ``arrived(n)`` is called on the loop for each that is here."""

    def __init__(
        self,
        crew: Crew,
        view: View,
        ledger: Ledger,
        ticket: Ticket,
        arrived: Callable[[int], None],
    ) -> None:
        self.in_offset = 0
        """Compressed offset up to which the blob was decoded; tells how far off a chunk is."""
        self._crew = crew
        self._view = view
        self._ledger = ledger
        self._ticket = ticket
        self._arrived = arrived
        self._held: list[tuple[int, bytes]] = []

    async def ranges(
        self, tier: Tier, source: LayerSource, blob: BlobRef, chunks: Sequence[int]
    ) -> None:
        """Fetch the ranges that give ``chunks``; what comes out on the way is kept too.

        Raises what the tier raised, CorruptError for bytes that are not the layer's, NoSpaceError,
        or what the view's disk says.
        """
        for span in plan(source.index, chunks, gap_bytes=self._crew.limits.gap_bytes):
            decoder = await offload(self._pool, self._decoder, source.index, span)
            self.in_offset = decoder.in_offset
            extent = Extent(decoder.in_offset, decoder.span.in_end - decoder.in_offset)
            try:
                if extent.length > 0:
                    pieces = tier.read(blob, extent, demand=self._ticket.demand)
                    await self._pump(tier, decoder, pieces)
                else:
                    await self._consume(tier, decoder, b"")  # all it needs was read before
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
        async with aclosing(pieces):
            async for piece in pieces:
                self._ledger.received(tier.name, len(piece), demand=self._ticket.demand)
                if decoder.done:
                    continue  # read to its end, a connection can be used again
                await self._consume(tier, decoder, piece)
                self.in_offset = decoder.in_offset
                await self._crew.slots.give_way(self._ticket, self._crew.limits.yield_most_s)
        await self._write_held(tier)

    async def _consume(self, tier: Tier, decoder: Decoder, piece: bytes) -> None:
        if self._ticket.demand:
            await self._write_held(tier)
            loop = asyncio.get_running_loop()
            full = await offload(
                self._crew.demand_pool, self._decode_and_put, decoder, piece, loop, tier.name
            )
            for number, data in full:
                await self._view.write(number, data, demand=True)
                self._told(number, tier.name, demand=True)
            return
        self._held += await offload(self._crew.background_pool, decoder.feed, piece)
        if len(self._held) >= self._crew.limits.write_run_chunks:
            await self._write_held(tier)

    def _decode_and_put(
        self, decoder: Decoder, piece: bytes, loop: asyncio.AbstractEventLoop, tier_name: str
    ) -> list[tuple[int, bytes]]:
        """In a thread: decode, verify, write, tell; the chunks that found no room."""
        full = []
        rest = memoryview(piece)
        while True:
            for number, data in decoder.feed(rest[:_PIECE_BYTES]):
                try:
                    fresh = self._view.put(number, data)
                except NoSpaceError:
                    full.append((number, data))
                    continue
                if fresh:
                    loop.call_soon_threadsafe(self._told, number, tier_name)
                else:
                    loop.call_soon_threadsafe(self._arrived, number)
            rest = rest[_PIECE_BYTES:]
            if not rest or decoder.done:
                return full

    async def _write_held(self, tier: Tier) -> None:
        """Write what a background transfer has gathered, in runs of neighbours."""
        held, self._held = self._held, []
        at = 0
        while at < len(held):
            first = held[at][0]
            run = [held[at][1]]
            while at + len(run) < len(held) and held[at + len(run)][0] == first + len(run):
                run.append(held[at + len(run)][1])
            kept = await self._view.write_run(first, run, demand=False)
            self._ledger.kept(tier.name, kept, demand=False)
            for number in range(first, first + len(run)):
                self._arrived(number)
            at += len(run)

    def _told(self, number: int, tier_name: str, *, demand: bool = True) -> None:
        self._ledger.kept(tier_name, 1, demand=demand)
        self._arrived(number)
        self._view.settle()
