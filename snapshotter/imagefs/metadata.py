"""The EROFS metadata images that get mounted: one for a layer, or one for a layer in its chain.

A layer whose tar leaves parents out, or hides what no layer below has, needs an image made for the
chain that it stands on. What was worked out for a chain is remembered on disk, so it is done once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from ioengine.directories import TEMPORARY, write_whole
from snapshotter.image.chain import adapt
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.index import LayerIndex
from snapshotter.image.lower import DirectoryLayer, ErofsLayer, LowerLayer
from snapshotter.image.scan import device_tag
from snapshotter.snapshots.lazy import StackEntry

KEY_HEX = 32
DIGESTS_KEPT = 1024
CHAINS_KEPT = 32
"""So many chains of one layer are remembered; each pull anew makes new ones, of new snapshots."""


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """A metadata image on disk; ``key`` names it, and with it the mount that is made of it."""

    key: str
    path: Path


class MetadataImages:
    """Writes metadata images into one directory; safe to call again after a kill at any point."""

    def __init__(self, directory: Path) -> None:
        """``directory`` is this daemon's alone: what a killed one was writing there goes."""
        self.directory = directory
        self._digests: dict[tuple[int, int, int], str] = {}
        for leftover in directory.glob(f"*{TEMPORARY}"):
            leftover.unlink()

    def of(self, index: LayerIndex, below: Sequence[tuple[StackEntry, str]]) -> MetadataImage:
        """The image for ``index`` on ``below`` (lowest first), each with its key ("" = plain).

        Reads the whole tree where the layer needs its chain: call it from a worker thread.
        """
        plain = index.layer.hex
        if not index.needs_chain:
            return self._write(plain, index.erofs)
        names = [
            f"{key} {self._digest(key)}" if key else f"snapshot {entry.snapshot_id} {entry.name}"
            for entry, key in below
        ]
        own = blake3(index.erofs).hexdigest()  # another index of the layer has another chain
        chain = blake3("\n".join([plain, own, *names]).encode()).hexdigest()[:KEY_HEX]
        key = f"{plain}-{chain}"
        path = self.path(key)
        same = path.with_suffix(".same")
        if _used(path):
            return MetadataImage(key, path)
        if _used(same):
            return self._write(plain, index.erofs)
        self._forget_oldest(plain)
        tree = ErofsReader(index.erofs).tree()
        adapted = adapt(tree, [self._lower(entry, key) for entry, key in below])
        if adapted is None:
            same.touch()
            return self._write(plain, index.erofs)
        image = write_erofs(
            adapted, device_bytes=index.view_bytes, device_tag=device_tag(index.diff_id)
        )
        return self._write(key, memoryview(image))

    def path(self, key: str) -> Path:
        """Where the metadata image ``key`` is."""
        return self.directory / f"{key}.erofs"

    def drop(self, layer_hex: str) -> None:
        """Delete every image made for a layer; what is mounted keeps its open file."""
        for path in self.directory.glob(f"{layer_hex}*"):
            path.unlink(missing_ok=True)

    def drop_chains(self, layer_hex: str) -> None:
        """As `drop`, of the images that were made for the layer on others."""
        for path in self.directory.glob(f"{layer_hex}-*"):
            path.unlink(missing_ok=True)

    def _forget_oldest(self, plain: str) -> None:
        """Make room for one more chain of a layer. What is mounted keeps its open file."""
        with_ages = [(path.stat().st_mtime_ns, path) for path in self.directory.glob(f"{plain}-*")]
        for _, path in sorted(with_ages, reverse=True)[CHAINS_KEPT - 1 :]:
            path.unlink(missing_ok=True)

    def _digest(self, key: str) -> str:
        """That of a metadata image on disk; one that is gone has none."""
        try:
            with self.path(key).open("rb") as file:
                facts = os.fstat(file.fileno())
                name = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
                known = self._digests.get(name)
                if known is None:
                    known = blake3(file.read()).hexdigest()
                    while len(self._digests) >= DIGESTS_KEPT:
                        self._digests.pop(next(iter(self._digests)), None)
                    self._digests[name] = known
                return known
        except FileNotFoundError:
            return ""

    def _lower(self, entry: StackEntry, key: str) -> LowerLayer:
        if not key:
            return DirectoryLayer(entry.directory)
        with self.path(key).open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return ErofsLayer(ErofsReader(view))

    def _write(self, key: str, image: memoryview) -> MetadataImage:
        path = self.path(key)
        if not _holds(path, image):  # nor may it be what another index said of the layer
            write_whole(path, image, synced=True)
        return MetadataImage(key, path)


def _holds(path: Path, image: memoryview) -> bool:
    """Whether the file is this very image."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != len(image):
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as there:
                return blake3(there).digest() == blake3(image).digest()
    except FileNotFoundError:
        return False


def _used(path: Path) -> bool:
    """Whether ``path`` is there; its time is that of its last use."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True
