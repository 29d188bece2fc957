"""A decoder whose window may not be here, and the stored bytes that it wants.

Both come at the same time: what is missing of the index costs no round trip more. Only where nobody
has that window is decoding begun at an earlier place, which costs bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace

from snapshotter.chunks.offload import offload, over
from snapshotter.content import Extent
from snapshotter.errors import RefusedError
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.fetch.windows import Windows
from snapshotter.image.decode import Decoder, Span
from snapshotter.image.index import LayerIndex

AHEAD_BYTES = 1024 * 1024
"""So much is asked for before the window is here. It is read to its end, so that nothing holds a
connection that the window may be waiting for."""
Pieces = AsyncGenerator[bytes, None]


def is_window_perhaps_missing(source: LayerSource, span: Span) -> bool:
    """Whether the index came without its windows, and ``span`` begins at one of them."""
    if not source.windows or span.checkpoint is None:
        return False
    return bool(source.index.checkpoint(span.checkpoint).window_stored_bytes)


async def begin_without(
    windows: Windows,
    pool: Executor,
    source: LayerSource,
    span: Span,
    read: Callable[[Extent], Pieces],
    ledger: Ledger,
    *,
    demand: bool,
) -> tuple[Decoder, Pieces]:
    """A decoder for ``span``, and what ``read`` gives, begun at the same time as its window.

    The caller closes the pieces. Raises WindowLostError, or what the tiers raised of a window that
    can't be had just now.
    """
    index = source.index
    assert span.checkpoint is not None
    point = index.checkpoint(span.checkpoint)
    first = Extent(span.in_offset, min(span.length_bytes, AHEAD_BYTES))
    rest = Extent(first.end, span.in_end - first.end)
    vain = windows.is_vain(source)  # then bytes from here on are of use only if the window is here
    ahead = None if vain else Ahead(read(first))
    try:
        stored = await offload(pool, index.local_window, point)
        if stored is None:
            stored = await windows.have(source, point, ledger, demand=demand)
    except BaseException:
        if ahead is not None:
            await ahead.close()
        raise
    if ahead is None:
        return Decoder(index, span, stored), read(Extent(span.in_offset, span.length_bytes))
    return Decoder(index, span, stored), _both(ahead, read, rest)


async def _both(ahead: Ahead, read: Callable[[Extent], Pieces], rest: Extent) -> Pieces:
    async with aclosing(ahead.pieces()) as pieces:
        async for piece in pieces:
            yield piece
    if rest.length:
        async with aclosing(read(rest)) as pieces:
            async for piece in pieces:
                yield piece


def nearest_before(index: LayerIndex, span: Span) -> Decoder:
    """From the nearest place before the span's where all is here; at the worst, the beginning.

    Reads what is here of the windows file: for a worker thread.
    """
    assert span.checkpoint
    for number in range(span.checkpoint - 1, -1, -1):
        point = index.checkpoint(number)
        stored = index.local_window(point)
        if stored is not None:
            first = -(-point.out_offset // index.chunk_bytes)
            at = replace(span, in_offset=point.in_offset, checkpoint=number, first_chunk=first)
            decoder = Decoder(index, at, stored)
            with contextlib.suppress(RefusedError):
                decoder.open()
                return decoder
    raise AssertionError("a layer's first byte needs no window")


class Ahead:
    """Reads before anybody takes."""

    def __init__(self, pieces: Pieces) -> None:
        """Begin to read ``pieces``, all of which are held until they are taken."""
        self._read: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(pieces))

    async def _run(self, pieces: Pieces) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._read.append(piece)
                    self._changed.set()
        finally:
            self._changed.set()

    async def pieces(self) -> Pieces:
        """All that was and will be read, and then the error that ended it, if one did."""
        try:
            while True:
                while self._read:
                    yield self._read.popleft()
                if self._task.done():
                    self._task.result()
                    return
                self._changed.clear()
                await self._changed.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop reading; twice is fine."""
        self._task.cancel()
        await over(self._task)
        self._read.clear()
