"""What Ember knows of images: their layers, where their blobs can be had, and why one is not lazy.

Kept in the daemon's database and mirrored in memory, so that lookups on the read path neither wait
nor await. Nothing here is shown to containerd: warm images must not look like snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import InvalidArgumentError
from snapshotter.oci.reference import parse_reference
from snapshotter.snapshots.schema import SchemaPiece

T = TypeVar("T")

FAULTS_KEPT = 4096

PIECE = SchemaPiece(
    "catalog",
    (
        """
    CREATE TABLE images (
        manifest TEXT PRIMARY KEY,
        names TEXT NOT NULL,
        repositories TEXT NOT NULL,
        lazy INTEGER NOT NULL,
        reason TEXT NOT NULL,
        seen_ns INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE image_layers (
        manifest TEXT NOT NULL REFERENCES images(manifest) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        blob TEXT NOT NULL,
        diff_id TEXT NOT NULL,
        chain_id TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        PRIMARY KEY (manifest, position)
    ) STRICT;
    CREATE TABLE layer_faults (
        blob TEXT NOT NULL,
        diff_id TEXT NOT NULL,
        reason TEXT NOT NULL,
        seen_ns INTEGER NOT NULL,
        PRIMARY KEY (blob, diff_id)
    ) STRICT;
    """,
        "ALTER TABLE images ADD COLUMN leaving INTEGER NOT NULL DEFAULT 0;",
    ),
)


class Store(Protocol):
    """The database: one transaction for each call, off the event loop."""

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T: ...

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an image: its blob, the digest of its plain bytes, and the chain up to it."""

    blob: Digest
    diff_id: Digest
    chain_id: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """A manifest that was seen on this node, with every name it was seen under.

    ``repositories`` are those that have given all of its layers to this node (admission.py).
    ``leaving``: it was removed while something stood on it, and goes when nothing does any more.
    """

    manifest: Digest
    names: tuple[str, ...]
    repositories: tuple[str, ...]
    layers: tuple[Layer, ...]
    lazy: bool
    reason: str
    seen_ns: int
    leaving: bool = False

    @property
    def places(self) -> list[str]:
        """The repositories that the image was seen in, those that gave all of it first."""
        places = dict.fromkeys(self.repositories)
        for name in self.names:
            with contextlib.suppress(InvalidArgumentError):
                places[parse_reference(name).name] = None
        return list(places)


class Catalog:
    """Images by manifest digest. Life story: ``load`` once, then remember, judge, forget."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._images: dict[Digest, Image] = {}
        self._by_view: dict[Digest, dict[Digest, None]] = {}
        self._by_blob: dict[Digest, dict[Digest, None]] = {}
        self._faults: dict[tuple[Digest, Digest], str] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read everything back; called once, before anything is served."""

        def work(db: sqlite3.Connection) -> tuple[list[Image], dict[tuple[Digest, Digest], str]]:
            layers: dict[str, list[Layer]] = {}
            rows = db.execute(
                "SELECT manifest, blob, diff_id, chain_id, size_bytes FROM image_layers"
                " ORDER BY manifest, position"
            )
            for manifest, blob, diff_id, chain_id, size in rows:
                layers.setdefault(manifest, []).append(
                    Layer(Digest.parse(blob), Digest.parse(diff_id), Digest.parse(chain_id), size)
                )
            images = [
                Image(
                    Digest.parse(manifest),
                    tuple(json.loads(names)),
                    tuple(json.loads(repositories)),
                    tuple(layers.get(manifest, ())),
                    bool(lazy),
                    reason,
                    seen_ns,
                    bool(leaving),
                )
                for manifest, names, repositories, lazy, reason, seen_ns, leaving in db.execute(
                    "SELECT manifest, names, repositories, lazy, reason, seen_ns, leaving"
                    " FROM images"
                )
            ]
            faults = {
                (Digest.parse(blob), Digest.parse(diff_id)): reason
                for blob, diff_id, reason in db.execute(
                    "SELECT blob, diff_id, reason FROM layer_faults ORDER BY seen_ns"
                )
            }
            return images, faults

        images, self._faults = await self._store.read(work)
        for image in images:
            self._mirror(image)

    async def remember(self, image: Image) -> Image:
        """Add ``image`` or merge it with what is known of its manifest; returns the merged one.

        Who names an image wants it: one that was leaving stays.
        """
        async with self._changing:
            known = self._images.get(image.manifest)
            if known is not None:
                names = tuple(dict.fromkeys((*image.names, *known.names)))
                repositories = tuple(dict.fromkeys((*image.repositories, *known.repositories)))
                seen_ns = max(image.seen_ns, known.seen_ns)
                image = replace(image, names=names, repositories=repositories, seen_ns=seen_ns)
            for other in list(self._images.values()):
                if other.manifest != image.manifest and set(other.names) & set(image.names):
                    left = tuple(name for name in other.names if name not in image.names)
                    await self._put(replace(other, names=left))
            await self._put(image)
            return image

    async def unname(self, manifest: Digest, names: Collection[str]) -> None:
        """Forget that the image goes by ``names``; it stays known, by its digest if need be."""
        async with self._changing:
            known = self._images.get(manifest)
            if known is not None and set(names) & set(known.names):
                kept = tuple(name for name in known.names if name not in names)
                await self._put(replace(known, names=kept))

    async def leave(self, manifest: Digest) -> None:
        """The image, if it is known, is to go when nothing stands on it any more."""
        await self._change(manifest, leaving=True)

    async def stay(self, manifest: Digest) -> None:
        """The image is wanted again."""
        await self._change(manifest, leaving=False)

    async def touch(self, manifest: Digest, seen_ns: int) -> None:
        """The image was seen in use."""
        await self._change(manifest, seen_ns=seen_ns)

    async def _change(self, manifest: Digest, **fields: Any) -> None:
        async with self._changing:
            image = self._images.get(manifest)
            if image is not None:
                await self._put(replace(image, **fields))

    async def _put(self, image: Image) -> None:
        manifest = str(image.manifest)

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM image_layers WHERE manifest = ?", (manifest,))
            db.execute(
                "INSERT INTO images (manifest, names, repositories, lazy, reason, seen_ns, leaving)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (manifest) DO UPDATE SET"
                " names = excluded.names, repositories = excluded.repositories,"
                " lazy = excluded.lazy, reason = excluded.reason, seen_ns = excluded.seen_ns,"
                " leaving = excluded.leaving",
                (
                    manifest,
                    json.dumps(image.names),
                    json.dumps(image.repositories),
                    int(image.lazy),
                    image.reason,
                    image.seen_ns,
                    int(image.leaving),
                ),
            )
            db.executemany(
                "INSERT INTO image_layers (manifest, position, blob, diff_id, chain_id, size_bytes)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (manifest, n, str(x.blob), str(x.diff_id), str(x.chain_id), x.size_bytes)
                    for n, x in enumerate(image.layers)
                ],
            )

        await self._store.write(work)
        self._mirror(image)

    def _mirror(self, image: Image) -> None:
        self._images[image.manifest] = image
        for layer in image.layers:
            self._by_view.setdefault(layer.diff_id, {})[layer.blob] = None
            self._by_blob.setdefault(layer.blob, {})[image.manifest] = None

    async def forget(self, manifest: Digest, seen_ns: int | None = None) -> bool:
        """Drop the image; layers that other images share stay known through those.

        False, and nothing happens, if it is known to have been seen after ``seen_ns``.
        """
        async with self._changing:
            known = self._images.get(manifest)
            if known is not None and seen_ns is not None and known.seen_ns > seen_ns:
                return False
            await self._forget(manifest)
            return True

    async def _forget(self, manifest: Digest) -> None:
        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM image_layers WHERE manifest = ?", (str(manifest),))
            db.execute("DELETE FROM images WHERE manifest = ?", (str(manifest),))

        await self._store.write(work)
        image = self._images.pop(manifest, None)
        for layer in image.layers if image else ():
            holders = self._by_blob.get(layer.blob, {})
            holders.pop(manifest, None)
            if not holders:
                self._by_blob.pop(layer.blob, None)
                blobs = self._by_view.get(layer.diff_id, {})
                blobs.pop(layer.blob, None)
                if not blobs:
                    self._by_view.pop(layer.diff_id, None)

    async def blame(self, blob: Digest, diff_id: Digest, reason: str, seen_ns: int) -> None:
        """Record that ``blob`` was refused, so that its images go another way from now on.

        As the layer with ``diff_id`` only: what one image promises wrongly of a blob must not
        harm another one that has it too. The last few thousand are known.
        """

        forgotten = [] if (blob, diff_id) in self._faults else list(self._faults)[: 1 - FAULTS_KEPT]

        def work(db: sqlite3.Connection) -> None:
            db.executemany(
                "DELETE FROM layer_faults WHERE blob = ? AND diff_id = ?",
                [(str(one), str(other)) for one, other in forgotten],
            )
            db.execute(
                "INSERT INTO layer_faults (blob, diff_id, reason, seen_ns) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (blob, diff_id) DO UPDATE SET reason = excluded.reason",
                (str(blob), str(diff_id), reason, seen_ns),
            )

        await self._store.write(work)
        for fault in forgotten:
            self._faults.pop(fault, None)
        self._faults[blob, diff_id] = reason

    def fault(self, blob: Digest, diff_id: Digest) -> str | None:
        """Why the layer was refused; None if it never was."""
        return self._faults.get((blob, diff_id))

    def images(self) -> list[Image]:
        """All images, the ones seen last first."""
        return sorted(self._images.values(), key=lambda image: -image.seen_ns)

    def image(self, manifest: Digest) -> Image | None:
        """The image with this manifest digest."""
        return self._images.get(manifest)

    def find(self, text: str) -> list[Image]:
        """Images that ``text`` means: a name, a manifest digest, or the start of its hex."""
        bare = text.removeprefix("sha256:")
        return [
            image
            for image in self.images()
            if text in image.names
            or any(name.rsplit("@", 1)[0] == text for name in image.names)
            or any(f"{place}@{image.manifest}" == text for place in image.places)
            or (len(bare) >= 6 and image.manifest.hex.startswith(bare))
        ]

    def layers_of_view(self, view: Digest) -> Iterable[Digest]:
        """The blobs that are known to unpack to ``view``."""
        return tuple(self._by_view.get(view, ()))

    def images_of_blob(self, blob: Digest) -> list[Image]:
        """The images that have ``blob`` as a layer."""
        return [self._images[m] for m in self._by_blob.get(blob, ()) if m in self._images]

    def unpacked_layers(self) -> Iterator[tuple[str, Layer]]:
        """Repository and layer of all that went the overlay way for another reason than a fault."""
        for image in self.images():
            places = sorted(image.places)
            if image.lazy or not places:
                continue
            for layer in image.layers:
                if self.fault(layer.blob, layer.diff_id) is None:
                    yield places[0], layer

    def names_of_blob(self, blob: Digest) -> list[str]:
        """What people call the images that have ``blob`` as a layer."""
        images = self.images_of_blob(blob)
        return sorted({name for image in images for name in image.names or (str(image.manifest),)})

    def is_given(self, repository: str, blob: Digest) -> bool:
        """Whether ``repository`` has given ``blob``, to an image that is known."""
        return any(repository in image.repositories for image in self.images_of_blob(blob))

    def origins(self, blob: Digest) -> list[BlobRef]:
        """Where ``blob`` can be had: each repository of each image that has it, last seen first."""
        found: dict[str, BlobRef] = {}
        images = self.images_of_blob(blob)
        for image in sorted(images, key=lambda image: -image.seen_ns):
            size = next(layer.size_bytes for layer in image.layers if layer.blob == blob)
            for repository in image.repositories:
                found.setdefault(repository, BlobRef(repository, blob, size))
        return list(found.values())
