"""When a chunk may be called durable, and when what was called so is in doubt.

Invariant: the durable bitmap on the disk holds only chunks whose bytes were synced before. After a
boot that did not end in order, or a failed sync, chunks are in doubt until they were read back from
the disk (not from the page cache) and had the right digest; those of a failed sync can't be read
until then. One round at a time per view.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from snapshotter.chunks.bulk import BulkIo
from snapshotter.chunks.datafile import DataFile, padded
from snapshotter.chunks.offload import offload
from snapshotter.chunks.presence import Presence
from snapshotter.errors import EmberError, NoSpaceError, UnavailableError

log = logging.getLogger(__name__)

IsRight = Callable[[int, memoryview], Awaitable[bool]]
"""Whether these bytes are chunk ``n``."""


@dataclass(slots=True)
class ProveReport:
    """What a round of reading back found: chunks that were right, chunks that were lost."""

    proved: int = 0
    lost: int = 0


class Durability:
    """The durable half of a view's presence. Used from the event loop."""

    def __init__(self, data: DataFile, presence: Presence, bulk: BulkIo) -> None:
        self._data = data
        self._presence = presence
        self._bulk = bulk
        self._round = asyncio.Lock()
        self._failures = 0
        self.doubted: set[int] = set()
        self.closed = False
        """From now on there is nothing to flush or to prove: it was done, or nobody wants it."""
        if presence.header.suspect:
            both = _or(presence.readable.snapshot(), presence.durable)
            self.doubted.update(_numbers(both))

    @property
    def count(self) -> int:
        """How many chunks would still be here after a power failure."""
        return int.from_bytes(self._presence.durable, "little").bit_count()

    @contextlib.contextmanager
    def landing(self, first: int, count: int = 1) -> Iterator[None]:
        """Chunks are written and marked readable in the block; any thread.

        A sync that fails in between may have covered them: they are in doubt then like all others.
        """
        before = self._failures
        yield
        if self._failures != before:
            self._doubt(range(first, first + count))

    def _doubt(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.doubted.add(number)
            self._presence.readable.clear(number)

    async def flush(self) -> int:
        """Sync the data, then say so in the bitmap; how many chunks became durable. Of a closed
        view none.

        UnavailableError when the sync failed; what it covered is in doubt then, and not readable.
        """
        async with self._round:
            return 0 if self.closed else await self._flush()

    async def prove(
        self, budget_chunks: int, is_right: IsRight, length_of: Callable[[int], int], step: int
    ) -> ProveReport:
        """Read up to ``budget_chunks`` doubted chunks back; those that are wrong are forgotten.

        ``step`` is the distance of two chunks in the data file, ``length_of`` their lengths.
        """
        report, lost = ProveReport(), list[int]()
        async with self._round:
            if self.closed:
                return report
            for number in sorted(self.doubted)[:budget_chunks]:
                if await self._on_disk(number, step, length_of(number), is_right):
                    report.proved += 1
                else:
                    report.lost += 1
                    lost.append(number)
                    self._presence.readable.clear(number)
                    log.error("chunk %d in %s is not what was written", number, self._data.path)
            with self._data.use():
                if lost:
                    kept = _without(self._presence.durable, lost)
                    await offload(None, self._presence.write_durable, kept)
                    self.doubted.difference_update(lost)
                if not self.doubted and self._presence.header.suspect:
                    await self._flush()
                    await offload(None, self._presence.mark, suspect=False)
        return report

    async def close(self, *, flush: bool) -> None:
        """Flush what can be flushed, note whether all was in order, and close both files."""
        async with self._round:
            clean = flush
            try:
                if flush:
                    await self._flush()
            except EmberError as error:
                log.warning("closing %s in doubt: %s", self._data.path, error)
                clean = False
            await offload(None, self._data.close)
            with contextlib.suppress(OSError):
                await offload(None, self._presence.mark, clean=clean)
            self._presence.close()
            self.closed = True

    async def _flush(self) -> int:
        presence = self._presence
        believed = int.from_bytes(presence.durable, "little")
        readable = _without(presence.readable.snapshot(), self.doubted)
        fresh = int.from_bytes(readable, "little") & ~believed
        if not fresh:
            return 0
        length = len(presence.durable)
        try:
            with self._data.use():
                await self._bulk.fdatasync(self._data.fd)
                bitmap = (believed | fresh).to_bytes(length, "little")
                await offload(None, presence.write_durable, bitmap)
        except (UnavailableError, NoSpaceError):
            # After a failed sync the kernel may drop the pages, also those that were written while
            # it went on: only reading back tells, and until then nobody may read them.
            self._failures += 1
            landed = int.from_bytes(presence.readable.snapshot(), "little") | fresh
            self._doubt(_numbers((landed & ~believed).to_bytes(length, "little")))
            with contextlib.suppress(OSError):
                await offload(None, presence.mark, suspect=True)
            raise
        return fresh.bit_count()

    async def _on_disk(self, number: int, step: int, length: int, is_right: IsRight) -> bool:
        right = False
        with contextlib.suppress(UnavailableError), self._data.use():
            async with self._bulk.buffers().take() as buffer:
                got = await self._bulk.read(
                    self._data.bulk_fd, buffer, number * step, padded(length)
                )
                right = got >= length and await is_right(number, buffer.memory[:length])
        if right:
            self.doubted.discard(number)
            self._presence.readable.set(number)
        return right


def _or(left: bytes, right: bytes) -> bytes:
    both = int.from_bytes(left, "little") | int.from_bytes(right, "little")
    return both.to_bytes(len(left), "little")


def _without(bitmap: bytes, numbers: Iterable[int]) -> bytes:
    rest = bytearray(bitmap)
    for number in numbers:
        rest[number >> 3] &= ~(1 << (number & 7))
    return bytes(rest)


def _numbers(bitmap: bytes) -> list[int]:
    return [
        index * 8 + bit
        for index, byte in enumerate(bitmap)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    ]
