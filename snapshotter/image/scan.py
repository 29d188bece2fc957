"""From a layer's plain bytes to its metadata image, as one thing that an indexer feeds.

The seam between the stream and the tar: an indexer knows no entries, the tar no compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from snapshotter.content import Digest
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.limits import ScanLimits
from snapshotter.image.tar import TarScanner

DEVICE_TAG_BYTES = 64
"""A device tag's room: all of a sha256 in hex, and the first half of a sha512."""


@dataclass(frozen=True, slots=True)
class LayerMetadata:
    """What a scan of the plain bytes found: the EROFS image and what to know about it."""

    erofs: bytes
    needs_chain: bool
    entry_count: int


class LayerScanner(Protocol):
    """Reads a layer's plain bytes as they come and makes its metadata image of them."""

    def feed(self, data: memoryview) -> None:
        """Take the next plain bytes, any number; RefusedError names the entry and its fault."""
        ...

    def finish(self, view: Digest, view_bytes: int) -> LayerMetadata:
        """The metadata, whose data device is the view; RefusedError if the archive is cut."""
        ...


def device_tag(view: Digest) -> bytes:
    """What a metadata image calls its data: the view's digest in hex, as far as it fits."""
    return view.hex[:DEVICE_TAG_BYTES].encode("ascii")


class TarLayerScanner:
    """Reads the plain bytes as tar."""

    def __init__(self, limits: ScanLimits) -> None:
        self._scanner = TarScanner(limits)

    def feed(self, data: memoryview) -> None:
        self._scanner.feed(data)

    def finish(self, view: Digest, view_bytes: int) -> LayerMetadata:
        tree = self._scanner.finish()
        erofs = write_erofs(tree, device_bytes=view_bytes, device_tag=device_tag(view))
        return LayerMetadata(erofs, tree.needs_chain, tree.entries)
