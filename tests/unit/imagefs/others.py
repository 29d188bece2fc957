"""Artifacts in memory, beside images in memory, and a node's part that looks for them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.content import BlobRef, Digest, chain_ids
from snapshotter.errors import EmberError, NotFoundError
from snapshotter.image.indexer import LayerIndexer
from snapshotter.imagefs.arrivals import Arrivals
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.lookup import Lookup, Outcome
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.trust import Trust
from snapshotter.indexes.keys import SigningKey, TrustedKeys, write_key_pair
from snapshotter.oci.documents import OCI_MANIFEST, Descriptor, digest_of
from snapshotter.oci.reference import Reference
from snapshotter.oci.resolver import FetchedManifest
from tests.fakes.hand_clock import HandClock
from tests.indexes import Change, MadeArtifact, artifact_of
from tests.unit.image.layers import member, text
from tests.unit.imagefs.first_pulls import plain_layer

REPOSITORY = "registry.example/app"


class Beside:
    """Registries: what lies beside images. ``answers``: whether they answer just now; blobs of
    repositories that begin with ``hangs`` come when it ``goes_on``."""

    def __init__(self) -> None:
        self.lists: dict[tuple[str, Digest], list[Descriptor]] = {}
        self.blobs: dict[Digest, bytes] = {}
        self.error: EmberError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = 0
        self.streamed: list[Digest] = []
        self.hangs: str | None = None
        self.hanging, self.goes_on = asyncio.Event(), asyncio.Event()

    def offer(self, image: Digest, *made: MadeArtifact, repository: str = REPOSITORY) -> None:
        entries = self.lists.setdefault((repository, image), [])
        for one in made:
            entries.append(Descriptor(OCI_MANIFEST, one.digest, len(one.manifest)))
            for blob in (one.manifest, *one.blobs):
                self.blobs[digest_of(blob)] = blob

    async def referrers(self, image: Reference, artifact_type: str) -> list[Descriptor]:
        self.asked += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        assert image.digest is not None
        return self.lists.get((image.name, image.digest), [])

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest:
        assert reference.digest is not None
        return FetchedManifest(self._blob(reference.digest), reference.digest, OCI_MANIFEST)

    async def document(self, blob: BlobRef) -> bytes:
        return self._blob(blob.digest)

    async def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        self.streamed.append(blob.digest)
        if self.hangs is not None and blob.repository.startswith(self.hangs):
            self.hanging.set()
            await self.goes_on.wait()
        data = self._blob(blob.digest)
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    def _blob(self, digest: Digest) -> bytes:
        if digest not in self.blobs:
            raise NotFoundError(f"{digest}: 404")
        return self.blobs[digest]


@functools.cache
def _packed(name: str) -> tuple[bytes, bytes]:
    """A layer's tar, long enough to need windows, and its gzip form."""
    plain = plain_layer(text(2_300_000, len(name)), name)
    return plain, member(plain, 1)


@dataclass
class Elsewhere:
    """An image of two layers, as another node has indexed it into ``directory``."""

    directory: Path
    names: tuple[str, ...] = ("low", "top")
    layers: list[Layer] = field(default_factory=list)
    plains: dict[Digest, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        made = [self._index(name) for name in self.names]
        chain = chain_ids([diff_id for _, diff_id, _ in made])
        self.layers = [
            Layer(blob, diff_id, chain_id, size)
            for (blob, diff_id, size), chain_id in zip(made, chain, strict=True)
        ]

    def _index(self, name: str) -> tuple[Digest, Digest, int]:
        plain, blob = _packed(name)
        digest, diff_id = digest_of(blob), digest_of(plain)
        self.plains[diff_id] = plain
        with LayerIndexer(
            digest, diff_id, blob_bytes=len(blob), sink=None, directory=self.directory
        ) as indexer:
            indexer.feed(blob)
            indexer.finish()
        return digest, diff_id, len(blob)

    @property
    def manifest(self) -> bytes:
        return " ".join(str(layer.blob) for layer in self.layers).encode()

    @property
    def document(self) -> ImageDocument:
        return self.document_in(REPOSITORY)

    def document_in(self, repository: str) -> ImageDocument:
        return ImageDocument(
            digest_of(self.manifest), f"{repository}:1", repository, tuple(self.layers)
        )

    def artifact(
        self, *keys: SigningKey, only: int | None = None, change: Change = bytes
    ) -> MadeArtifact:
        paths = [self.directory / f"{layer.blob.hex}.idx" for layer in self.layers[:only]]
        return artifact_of(self.manifest, paths, keys=keys, change=change)


class Looking:
    """Lookup and arrivals of a node over `Beside`."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor, mode: str = "signed") -> None:
        self.directory = directory
        self.keys = directory / "keys"
        self.keys.mkdir(parents=True)
        self.views: dict[Digest, tuple[Digest, ...]] = {}
        self.index = directory / "index"
        self.index.mkdir()
        self.beside = Beside()
        self.clock = HandClock()
        self.building: set[Digest] = set()
        self.condemned: dict[Digest, str] = {}
        self.ended: list[str] = []
        self.over = asyncio.Event()
        self.pool = pool
        self.start(mode)

    def start(self, mode: str = "signed", budget_s: float = 5.0) -> None:
        """A node that begins anew over the same shelf."""
        self.shelf = Shelf(self.index, lambda view: self.views.get(view, ()), lambda blob: ())
        self.trust = Trust(mode, TrustedKeys(self.keys))
        self.arrivals = Arrivals(
            self.shelf,
            self.trust,
            self.beside,
            lambda blob, diff_id: blob in self.building,
            self.pool,
        )
        self.lookup = Lookup(
            self.beside,
            self.arrivals,
            self.trust,
            self.condemned.get,
            self.clock,
            budget_s=budget_s,
            forget_s=600,
            count=self._count,
        )

    def _count(self, outcome: str) -> None:
        self.ended.append(outcome)
        if outcome not in ("slow", "busy"):
            self.over.set()

    def key(self, name: str, *, trusted: bool = True) -> SigningKey:
        """A new key pair; its public half lies among the trusted ones if it is ``trusted``."""
        made = write_key_pair(self.directory / name)
        if trusted:
            public = self.directory / f"{name}.pub"
            (self.keys / f"{name}.pub").write_bytes(public.read_bytes())
        return made

    def distrust(self, name: str) -> None:
        (self.keys / f"{name}.pub").unlink()


async def look(node: Looking, image: Elsewhere, repository: str = REPOSITORY) -> Outcome:
    return await node.lookup.look(image.document_in(repository), image.layers)


def here(node: Looking, image: Elsewhere) -> list[bool]:
    return [node.shelf.get(layer.blob) is not None for layer in image.layers]


def broken(plain: bytes) -> bytes:
    return plain[:520] + bytes([plain[520] ^ 1]) + plain[521:]
