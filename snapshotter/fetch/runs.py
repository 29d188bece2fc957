"""Chunks that nobody waits for: decoded where they are written from, in runs of neighbours.

Each run is one aligned buffer of the engine's. While one is being written the next is decoded, so
a transfer has two of them at most. No byte is copied between the decoder and the disk. It does not
know who brings the bytes or who wants the chunks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass

from snapshotter.chunks.bulk import BulkBuffer
from snapshotter.chunks.offload import offload, over
from snapshotter.chunks.view import View
from snapshotter.errors import NotFoundError, RefusedError
from snapshotter.fetch.tally import Ledger
from snapshotter.fetch.windows import WindowLostError
from snapshotter.image.decode import Decoder, Run


@dataclass(slots=True)
class _Lent:
    """A run, the buffer that it lies in, and how to give that back."""

    run: Run
    buffer: BulkBuffer
    stack: AsyncExitStack


class Runs:
    """What a transfer has decoded and not written; ``arrived(n)`` for each chunk once it is.

    Life: ``add`` and ``step`` while there ``is_more``, ``flush`` at the end, ``drop`` in any case.
    """

    def __init__(
        self, view: View, pool: Executor, ledger: Ledger, arrived: Callable[[int], None]
    ) -> None:
        self.tier_name = ""
        """Who brings what is added."""
        self._view = view
        self._pool = pool
        self._ledger = ledger
        self._arrived = arrived
        self._pieces: deque[memoryview] = deque()
        self._filling: _Lent | None = None
        self._writing: asyncio.Task[None] | None = None
        self._landing: _Lent | None = None
        """What is being written, or was last."""

    @property
    def is_more(self) -> bool:
        """Whether something was added that is not decoded."""
        return bool(self._pieces)

    @property
    def is_empty(self) -> bool:
        """Whether all that was added is decoded, written and told of."""
        return not self._pieces and self._filling is None and self._writing is None

    def add(self, pieces: Sequence[bytes]) -> None:
        """These are the next stored bytes."""
        self._pieces.extend(map(memoryview, pieces))

    async def step(self, decoder: Decoder) -> None:
        """Decode until a run is full, and begin to write it, or until there is no more."""
        if self._filling is None:
            stack = AsyncExitStack()
            buffer = await stack.enter_async_context(self._view.lend())
            self._filling = _Lent(Run(buffer.memory, decoder.index.chunk_bytes), buffer, stack)
        run = self._filling.run
        await offload(self._pool, self._decode, decoder, run)
        if run.is_full or decoder.done:
            await self._write(decoder)

    async def hand_over(self, decoder: Decoder) -> list[memoryview]:
        """Somebody waits by now: write what there is; the pieces that are not decoded."""
        await self.flush(decoder)
        left, self._pieces = self._pieces, deque()
        return list(left)

    async def flush(self, decoder: Decoder) -> None:
        """Write what is decoded, and return when it is told of."""
        if self._filling is not None:
            await self._write(decoder)
        await self._written()

    async def drop(self, decoder: Decoder) -> None:
        """Let go of everything; the decoder may be continued."""
        self._pieces.clear()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await over(writing)
        landing, self._landing = self._landing, None
        if landing is not None:  # a task that was cancelled before its first step gave nothing back
            await landing.stack.aclose()
        lent, self._filling = self._filling, None
        if lent is not None:
            decoder.take_back(lent.run)
            await lent.stack.aclose()

    def _decode(self, decoder: Decoder, run: Run) -> None:
        opened(decoder)
        while self._pieces and not run.is_full and not decoder.done:
            left = decoder.fill(self._pieces[0], run)
            if run.is_full:  # an empty rest gives what the decoder has decoded ahead
                self._pieces[0] = left
            else:
                self._pieces.popleft()
        if decoder.done:
            self._pieces.clear()

    async def _write(self, decoder: Decoder) -> None:
        await self._written()
        lent, self._filling = self._filling, None
        assert lent is not None
        decoder.take_back(lent.run)
        self._landing = lent
        self._writing = asyncio.create_task(self._keep(lent), name="write a run")

    async def _written(self) -> None:
        """The run that is being written is here; raises what the view did."""
        if self._writing is None:
            return
        await asyncio.wait({self._writing})
        writing, self._writing = self._writing, None
        await writing

    async def _keep(self, lent: _Lent) -> None:
        run = lent.run
        async with lent.stack:
            if run.count:
                fresh = await self._view.write_laid_out(run.first, run.count, lent.buffer)
                self._ledger.kept(self.tier_name, fresh, demand=False)
                for number in range(run.first, run.first + run.count):
                    self._arrived(number)


def opened(decoder: Decoder) -> Decoder:
    """The decoder, set up. WindowLostError: that needs a window that cannot be had."""
    try:
        decoder.open()
    except (NotFoundError, RefusedError) as error:
        decoder.failed = True
        raise WindowLostError(str(error)) from None
    return decoder
