"""An image whose index lies beside it in the registry, under a name that only this bed has.

So an index that an older build made, or that a first pull must not find, is never met.
"""

from __future__ import annotations

from dataclasses import replace

from bench.bed.link import Shape
from bench.trial import Starter, Trial

# Whoever may push to this registry is the bed itself.
TRUSTED = {"index": {"trust": "registry"}}


class Shared:
    """The image of ``starter`` once more, with its index beside it; Ember must be ``TRUSTED``."""

    def __init__(self, starter: Starter) -> None:
        shared = replace(starter.image, name=f"{starter.image.name}-{starter.bed.name}")
        self._starter = Starter(starter.bed, starter.containerd, starter.ember, shared)

    @property
    def reference(self) -> str:
        return self._starter.image.reference

    def push(self) -> None:
        """Push image and index, past the link's limit: nobody waits for it."""
        link = self._starter.bed.link
        shape = link.shape
        link.reshape(Shape(0))
        try:
            self._starter.image.push(self._starter.bed.registry)
            self._starter.daemon().share_index(self._starter.image.reference)
        finally:
            link.reshape(shape)

    def cold(self) -> Trial:
        """A start on a node that has never seen the image, nor its index."""
        trial = self._starter.first_pull()
        self.forget()
        return trial

    def forget(self) -> None:
        """Back to a node that has never seen it."""
        self._starter.forget()
