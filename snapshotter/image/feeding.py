"""A layer's stored bytes, given to its indexer: a block is indexed while the next one comes.

However it ends, no thread works for the indexer any more, so it may be finished or closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor

from snapshotter.chunks.offload import offload, over
from snapshotter.image.indexer import LayerIndexer

BLOCK_BYTES = 1024 * 1024


async def feed(
    indexer: LayerIndexer,
    parts: AsyncIterator[bytes],
    executor: Executor,
    taken: Callable[[int], object],
) -> None:
    """Give all ``parts`` to ``indexer``, in threads of ``executor``; ``taken`` is told the length
    of each block. Raises what the parts and the indexer raise."""
    feeding: asyncio.Task[None] | None = None
    block = bytearray()
    try:
        async for part in parts:
            block += part
            if len(block) < BLOCK_BYTES:
                continue
            if feeding is not None:
                await feeding
            taken(len(block))
            feeding = asyncio.create_task(offload(executor, indexer.feed, bytes(block)))
            block = bytearray()
        if feeding is not None:
            await feeding
        taken(len(block))
        await offload(executor, indexer.feed, bytes(block))
    finally:
        if feeding is not None:
            await over(feeding)
            feeding = None  # its error, if there is one, has come through this frame
