"""The origin as a tier: a registry client, behind the protocol that the road asks.

It does not know hosts, mirrors or credentials: those are the client's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from snapshotter.content import BlobRef, Extent


class RangeReader(Protocol):
    """What is needed of a registry client; errors as Tier has them."""

    def read(
        self, blob: BlobRef, extent: Extent, *, elsewhere: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Exactly the bytes of ``extent``, or an error.

        ``elsewhere``: the host that would be asked first is asked last.
        """
        ...

    def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        """The whole blob, or an error."""
        ...

    def suspect(self, blob: BlobRef) -> None:
        """Bytes of ``blob`` failed their digest."""
        ...


class RegistryTier:
    """Tier over a registry client. The registry does its own queueing; ``demand`` means nothing."""

    name = "registry"

    def __init__(self, reader: RangeReader, *, elsewhere: bool = False) -> None:
        self._reader = reader
        self._elsewhere = elsewhere

    def read(self, blob: BlobRef, extent: Extent, *, demand: bool) -> AsyncGenerator[bytes, None]:
        del demand
        return self._reader.read(blob, extent, elsewhere=self._elsewhere)

    def stream(self, blob: BlobRef, *, demand: bool) -> AsyncGenerator[bytes, None]:
        del demand
        return self._reader.stream(blob)

    def suspect(self, blob: BlobRef) -> None:
        self._reader.suspect(blob)
