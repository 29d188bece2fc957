"""One layer on its way into the cache, and what its stream needs of origin and chunk store.

Values and contracts only: `ingest` does the work, and others look at how far it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.quiet import Quiet


class Streams(Protocol):
    """Whole blobs from their origin; resumes by itself after a broken connection."""

    def stream(self, blob: BlobRef) -> AsyncIterator[bytes]: ...

    def suspect(self, blob: BlobRef) -> None:
        """The bytes were wrong: whoever sent them is asked last from now on."""
        ...


class Staging(Protocol):
    """A view that is being written whole and can't be read until it is sealed."""

    def sink(self, offset: int, data: memoryview) -> None:
        """Write plain bytes; called from a worker thread."""
        ...

    async def seal(self, index: LayerIndex) -> None:
        """Everything was right: make all of it readable, durably."""
        ...

    async def discard(self) -> None:
        """Throw away what was written."""
        ...


@dataclass(slots=True)
class Job:
    """One layer on its way: ``done_bytes`` of ``blob.size_bytes`` compressed bytes so far.

    ``begun``: bytes have come in the present try. ``quiet`` is None until its turn comes. It ends
    early once no block of `Ingest.wanted` wants it any more, unless it is ``lasting``.
    """

    blob: BlobRef
    diff_id: Digest
    started_s: float
    done_bytes: int = 0
    begun: bool = False
    error: EmberError | None = None
    quiet: Quiet | None = None
    lasting: bool = False
    wanted: int = 0
    task: asyncio.Task[None] | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def taken(self, length_bytes: int) -> None:
        """So many bytes more are with the indexer."""
        self.done_bytes += length_bytes

    @property
    def percent(self) -> int:
        """Share of the compressed bytes that has been indexed."""
        return 100 * self.done_bytes // max(1, self.blob.size_bytes)

    @property
    def quiet_s(self) -> float:
        """For how long nothing has come, if that is long."""
        return self.quiet.seconds if self.quiet is not None else 0.0
