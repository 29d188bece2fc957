"""Which layers unpack to a view: declared here, answered by whoever mounts images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from snapshotter.content import BlobRef, Digest
from snapshotter.image.index import LayerIndex


@dataclass(frozen=True, slots=True)
class LayerSource:
    """One layer blob that unpacks to the view, and the repositories that have it, best first.

    ``windows``: where the index's windows file can be had, for those that are not here.
    """

    index: LayerIndex
    blobs: tuple[BlobRef, ...]
    windows: tuple[BlobRef, ...] = ()


class Sources(Protocol):
    """What is known of views."""

    def of_view(self, view: Digest) -> Sequence[LayerSource]:
        """The layers that unpack to ``view``, best first; quick, from memory. Empty: none known.

        Every index is trusted: built here from verified bytes, or checked against such.
        """
        ...

    def look_further(self, view: Digest) -> None:
        """A layer of ``view`` is gone from its origin: find other sources, for a later round.

        Quick; called again for as long as nothing comes of it.
        """
        ...
