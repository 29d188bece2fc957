"""One open view: its sparse file, which chunks of it are here, and the only ways to add one.

Invariant: a bit of the readable bitmap is set after the chunk's verified bytes were written. Chunks
a reader waits for are written through the page cache (the reader finds them there), others around
it. It does not know where bytes come from or who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from ioengine.bitmap import Bitmap
from snapshotter.chunks.bulk import BulkBuffer, BulkIo
from snapshotter.chunks.datafile import ClosedError, DataFile, padded
from snapshotter.chunks.durability import Durability, ProveReport
from snapshotter.chunks.offload import offload
from snapshotter.chunks.presence import Presence
from snapshotter.chunks.space import Space
from snapshotter.chunks.verify import ChunkDigests, chunk_length, verify_chunk
from snapshotter.content import Digest, Extent
from snapshotter.errors import CorruptError, NoSpaceError

_ROOM_TRIES = 8

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class ViewServices:
    """What all views of a store share. ``pool`` runs hashing and writes off the event loop."""

    bulk: BulkIo
    space: Space
    pool: Executor


class View:
    """An open view. put() and the questions may be used from threads, the rest from the loop."""

    def __init__(
        self,
        data: DataFile,
        presence: Presence,
        chunk_digest: ChunkDigests,
        services: ViewServices,
    ) -> None:
        header = presence.header
        self.digest: Digest = header.view
        self.length_bytes = header.view_bytes
        self.chunk_bytes = header.chunk_bytes
        self.chunk_count = header.chunk_count
        self.path = data.path
        self.inode, self.device = data.inode, data.device
        self._data = data
        self._presence = presence
        self._chunk_digest = chunk_digest
        self._services = services
        self._durability = Durability(data, presence, services.bulk)
        self._listeners: list[Callable[[], None]] = []

    @property
    def _readable(self) -> Bitmap:
        if self._durability.closed:
            raise ClosedError(f"{self.digest} was closed in the meantime; ask again")
        return self._presence.readable

    @property
    def readable_bitmap(self) -> memoryview:
        """The live bitmap (shared memory) for the guard, which lets go of it before close()."""
        return self._readable.memory

    @property
    def readable_count(self) -> int:
        """How many chunks can be read."""
        return self._readable.population()

    @property
    def durable_count(self) -> int:
        """How many chunks would still be here after a power failure."""
        return self._durability.count

    @property
    def whole(self) -> bool:
        """Every chunk can be read."""
        return self._readable.all(0, self.chunk_count)

    @property
    def complete(self) -> bool:
        """Every chunk is readable and durable, and none is in doubt.

        What is only readable may be lost with a failed sync: who reads past the guard needs more.
        """
        return (
            self.whole and not self._durability.doubted and self.durable_count == self.chunk_count
        )

    def is_readable(self, number: int) -> bool:
        """Whether chunk ``number`` is here, verified."""
        return self._readable.get(number)

    def clamp(self, extent: Extent) -> Extent:
        """The part of ``extent`` that lies inside the view."""
        start = min(max(0, extent.offset), self.length_bytes)
        return Extent(start, max(0, min(extent.end, self.length_bytes) - start))

    def missing(self, extent: Extent) -> list[int]:
        """The chunks of ``extent`` that are not here, rising; what lies past the end is ignored.

        Empty means that every byte of it can be read now.
        """
        numbers = self.clamp(extent).chunks(self.chunk_bytes)
        if not numbers:
            return []
        return list(self._readable.zeros(numbers.start, numbers.stop))

    def length_of(self, number: int) -> int:
        """Bytes of chunk ``number``."""
        return chunk_length(number, self.length_bytes, self.chunk_bytes)

    def verify(self, number: int, data: Bytes) -> None:
        """CorruptError unless ``data`` is chunk ``number``."""
        digest = self._chunk_digest(number)
        verify_chunk(self.digest, number, data, self.length_of(number), digest)

    def put(self, number: int, data: Bytes, *, demand: bool = True) -> bool:
        """Verify, reserve, write through the page cache, mark readable; blocks, any thread.

        False: it was here already. CorruptError (nothing was written), NoSpaceError (nothing was
        evicted yet: write() does that), DiskError when the cache's disk refuses.
        """
        if self.is_readable(number):
            return False
        self.verify(number, data)
        with self._data.use(), self._durability.landing(number):
            self._data.write_buffered(number * self.chunk_bytes, data, demand=demand)
            self._readable.set(number)
        return True

    async def write(self, number: int, data: Bytes, *, demand: bool) -> bool:
        """write_run() of one chunk: whether it was not here before."""
        return await self.write_run(number, [data], demand=demand) == 1

    async def write_run(self, first: int, parts: Sequence[Bytes], *, demand: bool) -> int:
        """Write neighbouring chunks from ``first`` on; how many were not here before.

        Raises as put(), but NoSpaceError only when nothing more can give way. Chunks before the
        one that failed are kept.
        """
        try:
            if not demand and self._data.direct_fd >= 0:
                return await self._write_direct(first, parts)
            written = 0
            for number, part in enumerate(parts, first):
                step = partial(self.put, number, part, demand=demand)
                written += await self._with_room(step, len(part), demand=demand)
            return written
        finally:
            self.settle()

    def lend(self) -> AbstractAsyncContextManager[BulkBuffer]:
        """An aligned buffer for the length of a block, for `write_laid_out`; waits for one."""
        return self._services.bulk.buffers().take()

    async def write_laid_out(self, first: int, count: int, buffer: BulkBuffer) -> int:
        """As write_run without demand, of ``count`` chunks from the start of a lent ``buffer``.

        What lies in it is moved about: chunks that are here already are not written again.
        """
        if self._data.direct_fd < 0:
            return await self._write_some(range(first, first + count), buffer.memory)
        written = 0
        try:
            for part in _neighbours(self._readable.zeros(first, first + count)):
                begin = (part.start - first) * self.chunk_bytes
                length = await offload(
                    self._services.pool, self._bring_forward, part, begin, buffer.memory
                )
                await self._write_judged(part, buffer, length)
                written += len(part)
        finally:
            self.settle()
        return written

    async def _write_some(self, numbers: range, memory: memoryview) -> int:
        """Those of them that are not here, on a file system that knows no direct transfers."""
        written = at = 0
        try:
            for number in numbers:
                part = memory[at : at + self.length_of(number)]
                step = partial(self.put, number, part, demand=False)
                written += await self._with_room(step, len(part), demand=False)
                at += len(part)
            return written
        finally:
            self.settle()

    def _bring_forward(self, numbers: range, begin: int, memory: memoryview) -> int:
        """Verify chunks that lie in ``memory`` from ``begin`` on, and have them at its start, from
        where it is written; their length in whole blocks."""
        end = begin
        for number in numbers:
            length = self.length_of(number)
            self.verify(number, memory[end : end + length])
            end += length
        if begin:
            memory[: end - begin] = memory[begin:end]
        return _pad(memory, end - begin)

    def when_complete(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop once the view is complete; at once if it is."""
        if self.complete:
            callback()
        else:
            self._listeners.append(callback)

    def settle(self) -> None:
        """Tell those who wait for completeness; called on the loop."""
        if self._listeners and not self._durability.closed and self.complete:
            listeners, self._listeners = self._listeners, []
            for callback in listeners:
                callback()

    async def flush(self) -> int:
        """Make durable what is readable; how many chunks that were, 0 of a closed view.

        UnavailableError: not now.
        """
        made_durable = await self._durability.flush()
        self.settle()
        return made_durable

    def unproved(self) -> list[int]:
        """Chunks that are believed but were not read back since they came into doubt."""
        return sorted(self._durability.doubted)

    async def prove(self, budget_chunks: int) -> ProveReport:
        """Read up to ``budget_chunks`` doubted chunks back from the disk, check their digests.

        A chunk that is wrong is readable no longer, so the next reader has it fetched again.
        """
        report = await self._durability.prove(
            budget_chunks, self._is_right, self.length_of, self.chunk_bytes
        )
        self.settle()
        return report

    async def close(self, *, flush: bool = True) -> None:
        """Flush what can be flushed and close; the guard has let go of the bitmap."""
        self._listeners.clear()  # they know the view: together they'd keep its index open
        await self._durability.close(flush=flush)

    async def _write_direct(self, first: int, parts: Sequence[Bytes]) -> int:
        """Gather runs of chunks that are not here in an aligned buffer and write them."""
        written = at = 0
        while at < len(parts):
            async with self._services.bulk.buffers().take() as buffer:
                room = max(1, len(buffer.memory) // self.chunk_bytes)
                run = list[Bytes]()
                while (
                    at + len(run) < len(parts)
                    and len(run) < room
                    and not self.is_readable(first + at + len(run))
                ):
                    run.append(parts[at + len(run)])
                if run:
                    await self._write_gathered(first + at, run, buffer)
            written += len(run)
            at += len(run) or 1
        return written

    async def _write_gathered(self, first: int, run: Sequence[Bytes], buffer: BulkBuffer) -> None:
        pool = self._services.pool
        length = await offload(pool, self._gather, first, run, buffer.memory)
        await self._write_judged(range(first, first + len(run)), buffer, length)

    async def _write_judged(self, numbers: range, buffer: BulkBuffer, length: int) -> None:
        """Write verified chunks, ``length`` bytes in whole blocks, from the start of ``buffer``."""
        first, count = numbers.start, len(numbers)
        offset = first * self.chunk_bytes
        await self._with_room(partial(self._data.reserve, offset, length), length, demand=False)
        with self._data.use(), self._durability.landing(first, count):
            await self._services.bulk.write(self._data.bulk_fd, buffer, offset, length)
            self._readable.set(first, count)

    def _gather(self, first: int, run: Sequence[Bytes], memory: memoryview) -> int:
        """Verify every part and lay it out in ``memory``, zeros up to the next block."""
        at = 0
        for number, part in enumerate(run, first):
            self.verify(number, part)
            memory[at : at + len(part)] = part
            at += len(part)
        return _pad(memory, at)

    async def _with_room(
        self, step: Callable[[], bool | None], length: int, *, demand: bool
    ) -> bool:
        """Run ``step`` in the pool; on a full disk make room and try again, a bounded number."""
        for _ in range(_ROOM_TRIES):
            try:
                return bool(await offload(self._services.pool, step))
            except NoSpaceError as error:
                if not await self._services.space.make_room(length, demand=demand):
                    self._services.space.complain(f"{self.digest}: {error}")
                    raise
        return bool(await offload(self._services.pool, step))

    async def _is_right(self, number: int, data: memoryview) -> bool:
        try:
            await offload(self._services.pool, self.verify, number, data)
        except CorruptError:
            return False
        return True


def _neighbours(numbers: Iterable[int]) -> list[range]:
    """``numbers``, which rise, as ranges without a gap."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _pad(memory: memoryview, end: int) -> int:
    """Zeros behind ``end`` up to the next block; where that is."""
    length = padded(end)
    memory[end:length] = bytes(length - end)
    return length
