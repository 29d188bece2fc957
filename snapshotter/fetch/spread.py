"""Whole blobs as streams, read over several connections: ranges side by side, given out in order.

As many ranges are under way as the origin's connections are worth (pace.py), and no more than are
held in memory. A range that breaks off is taken up where it broke. Where there are no ranges the
blob comes over one connection. Whether the bytes are right the caller finds out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import RangeUnsupportedError, UnavailableError
from snapshotter.fetch.pace import Connections, Origins, origin_of
from snapshotter.oci.streaming import Resumption
from snapshotter.tasks import end_all

PART_BYTES = 2 * 1024 * 1024
MOST_PARTS = 8
"""Ranges of one blob under way or waiting to be given out: what one stream holds in memory."""


class Blobs(Protocol):
    """An origin; errors as RegistryClient has them."""

    def read(self, blob: BlobRef, extent: Extent) -> AsyncGenerator[bytes, None]:
        """Exactly the bytes of ``extent``, or an error."""
        ...

    def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        """The whole blob over one connection, or an error."""
        ...

    def suspect(self, blob: BlobRef) -> None:
        """Bytes of ``blob`` failed their digest."""
        ...


class SpreadStreams:
    """Streams of blobs from ``blobs``; event loop only."""

    def __init__(self, blobs: Blobs, origins: Origins, clock: Clock) -> None:
        self._blobs = blobs
        self._origins = origins
        self._clock = clock

    def suspect(self, blob: BlobRef) -> None:
        """Bytes of ``blob`` were wrong."""
        self._blobs.suspect(blob)

    async def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        """The blob's bytes in order, exactly ``size_bytes``, or an error as RegistryClient's."""
        given = 0
        if blob.size_bytes >= 2 * PART_BYTES:
            connections = self._origins.of(origin_of(blob.repository))
            spread = _Spread(self._blobs, blob, connections, self._clock)
            try:
                async with aclosing(spread.run()) as pieces:
                    async for piece in pieces:
                        given += len(piece)
                        yield piece
            except RangeUnsupportedError:
                pass
            else:
                return
        async with aclosing(self._blobs.stream(blob)) as pieces:
            async for piece in pieces:  # what was given out is not given out again
                skipped = min(given, len(piece))
                given -= skipped
                if skipped < len(piece):
                    yield piece[skipped:]


class _Part:
    """One range on its way. ``pieces`` have come and were not given out yet."""

    def __init__(self, extent: Extent) -> None:
        self.left = extent
        self.pieces: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.is_queued = True
        """Its connection is not counted yet."""

    def take(self, piece: bytes) -> None:
        self.left = Extent(self.left.offset + len(piece), self.left.length - len(piece))
        self.pieces.append(piece)
        self.news.set()

    async def given_out(self) -> AsyncGenerator[bytes, None]:
        """Its pieces in order; raises what its task raised, once they are given out."""
        assert self.task is not None
        while True:
            self.news.clear()
            while self.pieces:
                yield self.pieces.popleft()
            if self.task.done() and not self.pieces:
                self.task.result()
                return
            await self.news.wait()


class _Spread:
    """One blob. Ends all that is under way when its stream is closed."""

    def __init__(self, blobs: Blobs, blob: BlobRef, connections: Connections, clock: Clock) -> None:
        self._blobs = blobs
        self._blob = blob
        self._connections = connections
        self._clock = clock
        self._parts: deque[_Part] = deque()
        self._next_offset = 0
        self._begun = self._over = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            self._start_some()
            while self._parts:
                async with aclosing(self._parts[0].given_out()) as pieces:
                    async for piece in pieces:
                        yield piece
                self._parts.popleft()
                self._start_some()
        finally:
            self._over = True
            await end_all(part.task for part in self._parts)

    def _start_some(self) -> None:
        """One range in any case; more while they are worth it, once the first has brought any."""
        while not self._over and self._next_offset < self._blob.size_bytes:
            room = self._begun and len(self._parts) < MOST_PARTS
            queued = sum(part.is_queued for part in self._parts)
            worth = self._connections.open + queued < self._connections.allowed
            if self._parts and not (room and worth):
                return
            self._start()

    def _start(self) -> None:
        length = min(PART_BYTES, self._blob.size_bytes - self._next_offset)
        part = _Part(Extent(self._next_offset, length))
        self._next_offset += length
        part.task = asyncio.create_task(self._read(part), name=f"stream {self._blob.digest}")
        self._parts.append(part)

        def ended(task: asyncio.Task[None]) -> None:
            part.is_queued = False
            part.news.set()
            if not task.cancelled() and task.exception() is None:
                self._start_some()

        part.task.add_done_callback(ended)

    async def _read(self, part: _Part) -> None:
        length, resumption = part.left.length, Resumption(self._clock, progress_bytes=1)
        while part.left.length:
            try:
                with self._connections.running():
                    part.is_queued = False
                    async with aclosing(self._blobs.read(self._blob, part.left)) as pieces:
                        async for piece in pieces:
                            self._connections.received(len(piece))
                            part.take(piece)
                            self._begun = True
                            self._start_some()
            except UnavailableError as error:
                await resumption.pause(error, length - part.left.length, begun=self._begun)
