"""Wrappers that hold any tier to its contract, and the one function that says their order.

A wrapped tier gives exactly what was asked for and never hangs, whatever is inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from snapshotter.content import BlobRef, Extent
from snapshotter.errors import CorruptError, DeadlineError, UnavailableError
from snapshotter.tiers.tier import Tier


def guarded(tier: Tier, *, stall_s: float = 30.0) -> Tier:
    """``tier`` with every guard: first its patience, then, around it, its lengths."""
    return ExactTier(PatientTier(tier, stall_s))


class ExactTier:
    """Ends a read that brings more or fewer bytes than were asked for."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.name = inner.name

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> AsyncGenerator[bytes, None]:
        pieces = self._inner.read(blob, extent, demand=demand)
        return self._exactly(pieces, extent.length, blob)

    def stream(self, blob: BlobRef, *, demand: bool) -> AsyncGenerator[bytes, None]:
        return self._exactly(self._inner.stream(blob, demand=demand), blob.size_bytes, blob)

    def suspect(self, blob: BlobRef) -> None:
        self._inner.suspect(blob)

    async def _exactly(
        self, pieces: AsyncGenerator[bytes, None], length: int, blob: BlobRef
    ) -> AsyncGenerator[bytes, None]:
        left = length
        async with aclosing(pieces):
            async for piece in pieces:
                left -= len(piece)
                if left < 0:
                    raise CorruptError(
                        f"{self.name} sent more than {length} bytes of {blob.digest}"
                    )
                yield piece
        if left:
            raise UnavailableError(
                f"{self.name} ended {left} bytes before {length} bytes of {blob.digest}"
            )


class PatientTier:
    """Ends a read that brings nothing for ``stall_s`` seconds."""

    def __init__(self, inner: Tier, stall_s: float) -> None:
        self._inner = inner
        self._stall_s = stall_s
        self.name = inner.name

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> AsyncGenerator[bytes, None]:
        return self._patiently(self._inner.read(blob, extent, demand=demand), blob)

    def stream(self, blob: BlobRef, *, demand: bool) -> AsyncGenerator[bytes, None]:
        return self._patiently(self._inner.stream(blob, demand=demand), blob)

    def suspect(self, blob: BlobRef) -> None:
        self._inner.suspect(blob)

    async def _patiently(
        self, pieces: AsyncGenerator[bytes, None], blob: BlobRef
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            while True:
                try:
                    async with asyncio.timeout(self._stall_s):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineError(
                        f"{self.name} sent nothing of {blob.digest} for {self._stall_s:g} s"
                    ) from None
                yield piece
