"""What the snapshotter needs of lazy layers: the protocol, declared by its consumer.

Life of a lazy layer: containerd prepares a layer it wants to unpack -> ``claim`` takes it or not
(for the whole image at once) -> taken, a committed row stands for it and its bytes may still be
anywhere -> ``mount`` makes it readable before something stands on it -> ``release`` when its row is
gone. The provider must not call back into the snapshotter from within these calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from snapshotter.content import Digest
from snapshotter.snapshots.model import Usage


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One layer of a chain, as overlayfs will stack it.

    ``directory`` is the path that is handed to overlayfs. Of a plain layer it is a directory; of a
    lazy one (``layer`` set) ``mount`` puts a link there once the layer can be read, and until then
    it does not exist, so that a mount that comes too early fails instead of showing nothing.
    ``chain_id`` is the label snapshot.ref, where the snapshot has one.
    """

    snapshot_id: int
    name: str
    directory: Path
    layer: Digest | None
    chain_id: str | None
    view: Digest | None = None


@dataclass(frozen=True, slots=True)
class LayerClaim:
    """A layer that containerd is about to fetch and unpack, with all that it says of it.

    ``image_layers`` are the digests of this layer and those above (maybe cut). Fields are None
    where the client sent no such label: without an image reference nothing can be fetched.
    ``being_unpacked``: another client was told to unpack this very layer, and is at it.
    """

    namespace: str
    chain_id: str
    parent: str
    image_ref: str | None
    manifest_digest: Digest | None
    layer_digest: Digest | None
    image_layers: tuple[Digest, ...]
    diff_id: Digest | None
    below: tuple[StackEntry, ...]
    labels: Mapping[str, str] = field(repr=False)
    being_unpacked: bool = False


@dataclass(frozen=True, slots=True)
class LazyLayer:
    """The answer to a claim: the blob that the layer comes from and the view that shows it."""

    layer: Digest
    view: Digest


class LazyLayers(Protocol):
    """Turns layers into directories without unpacking them."""

    async def claim(self, claim: LayerClaim) -> LazyLayer | None:
        """Decide within a few seconds; None (for every layer of the image): unpack it.

        What is answered for one layer holds for the whole pull. A layer may be claimed again: by
        another client, or because the first one hung up.
        """
        ...

    def is_fit(self, layer: Digest, view: Digest) -> bool:
        """False once a layer that was taken turned out never to become readable: from then on
        whoever prepares it unpacks it. Quick, from memory."""
        ...

    async def mount(self, stack: Sequence[StackEntry], wait_s: float) -> None:
        """Make the directory of every lazy entry of ``stack`` (lowest first) readable.

        UnavailableError, with the progress so far, if that takes longer than ``wait_s`` seconds.
        """
        ...

    async def release(self, entry: StackEntry) -> None:
        """The row of ``entry`` is gone: unmount it. Quick; what fails is tried again later."""
        ...

    async def usage(self, entry: StackEntry) -> Usage:
        """What the layer takes on disk here and now."""
        ...


class PlainOnly:
    """No layer is lazy: the snapshotter is a complete overlay snapshotter."""

    async def claim(self, claim: LayerClaim) -> LazyLayer | None:
        return None

    def is_fit(self, layer: Digest, view: Digest) -> bool:
        return True

    async def mount(self, stack: Sequence[StackEntry], wait_s: float) -> None:
        return None

    async def release(self, entry: StackEntry) -> None:
        return None

    async def usage(self, entry: StackEntry) -> Usage:
        return Usage(0, 0)
