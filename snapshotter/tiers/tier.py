"""A tier: somewhere outside this node's disk that a blob's bytes can come from.

What a read may end with, and what the road makes of it:
- exactly the bytes, in order: good. Whether they are the right ones, the chunk digests tell.
- BusyError: come back later, not before ``retry_after_s``. No blame. Whom that is for the tier
  knows (one credential of many, say): it answers so at once until then, and asks nobody.
- NotFoundError: this tier does not have the blob. No blame.
- RangeUnsupportedError: only the whole blob can be had, by stream().
- any other EmberError: a failure. The tier is asked later than others for a while.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from snapshotter.content import BlobRef, Extent


class Tier(Protocol):
    """One source of blobs; used from the event loop by many at once.

    A generator that is not read to its end must be closed (contextlib.aclosing), which lets go of
    its connection. Every wait inside has a deadline.
    """

    @property
    def name(self) -> str:
        """A short fixed word for counters and status: ``registry``, ``peer``, …"""
        ...

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> AsyncGenerator[bytes, None]:
        """The stored bytes of ``extent``, in pieces of any size; an error may come after some.

        ``demand`` says that somebody waits. Errors as above; more or fewer bytes never.
        """
        ...

    def stream(self, blob: BlobRef, *, demand: bool) -> AsyncGenerator[bytes, None]:
        """The whole blob from its first byte, exactly ``blob.size_bytes``; errors as above."""
        ...

    def suspect(self, blob: BlobRef) -> None:
        """Bytes of ``blob`` that came from here failed their digest."""
        ...
