"""What several tests of the image file system stand on: claims, documents, origins in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.snapshots.lazy import LayerClaim, StackEntry
from tests.fakes.lazy import digest

REFERENCE = "registry.example/app:1"


def layer(name: str, size_bytes: int = 1000) -> Layer:
    return Layer(digest(name), digest(f"plain {name}"), digest(f"chain {name}"), size_bytes)


def document(*layers: Layer) -> ImageDocument:
    return ImageDocument(digest("manifest"), REFERENCE, "registry.example/app", layers)


def claim(
    of: Layer,
    *,
    on: Layer | None = None,
    labelled: bool = True,
    being_unpacked: bool = False,
) -> LayerClaim:
    """What containerd says of layer ``of``, to be unpacked onto ``on``."""
    return LayerClaim(
        namespace="default",
        chain_id=str(of.chain_id),
        parent="",
        image_ref=REFERENCE if labelled else None,
        manifest_digest=digest("manifest") if labelled else None,
        layer_digest=of.blob if labelled else None,
        image_layers=(of.blob,),
        diff_id=of.diff_id,
        below=() if on is None else (plain(on),),
        labels={},
        being_unpacked=being_unpacked,
    )


def plain(of: Layer) -> StackEntry:
    """The snapshot of a layer that containerd has unpacked."""
    return StackEntry(1, str(of.chain_id), Path("/snapshots/1/fs"), None, str(of.chain_id))


class Documents:
    """Answers with one document, or fails."""

    def __init__(self, answer: ImageDocument | EmberError) -> None:
        self.answer = answer
        self.asked = 0

    async def image(self, namespace: str, manifest: Digest, reference: str) -> ImageDocument:
        self.asked += 1
        if isinstance(self.answer, EmberError):
            raise self.answer
        return self.answer


class Origin:
    """A registry that lets everybody in and gives every layer, or refuses; or does not answer."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: EmberError | None = None
        self.asked = 0
        self.refused: dict[Digest, EmberError] = {}
        self.given: list[BlobRef] = []

    async def gives(self, blob: BlobRef) -> None:
        if blob.digest in self.refused:
            raise self.refused[blob.digest]
        self.given.append(blob)

    async def check(self, reference: str, manifest: Digest) -> None:
        self.asked += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error


class Streams:
    """First pulls that are only noted."""

    def __init__(self) -> None:
        self.started: list[BlobRef] = []
        self.per_second = 1e6

    def running(self, blob: Digest, diff_id: Digest) -> bool:
        return any(ref.digest == blob for ref in self.started)

    def start(self, blob: BlobRef, diff_id: Digest) -> object:
        self.started.append(blob)
        return object()

    def rate(self, registry: str) -> float:
        return self.per_second


class Later:
    """Layers whose index is wanted when there is time."""

    def __init__(self) -> None:
        self.wanted: list[Layer] = []

    def want(self, namespace: str, image: ImageDocument, layers: Sequence[Layer]) -> None:
        self.wanted.extend(layers)


class Staged:
    """A view in memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.sealed: LayerIndex | None = None
        self.discarded = False

    def sink(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data

    async def seal(self, index: LayerIndex) -> None:
        self.sealed = index

    async def discard(self) -> None:
        self.discarded = True


class Others:
    """Indexes that others made: by default there is none. ``indexes`` lie beside the image."""

    def __init__(self) -> None:
        self.asked: list[Layer] = []
        self.doubts: dict[Layer, str] = {}
        self.kept: str | None = None
        self.discarded: list[Layer] = []
        self.answers = asyncio.Event()
        self.answers.set()

    def doubtful(self, document: ImageDocument) -> dict[Layer, str]:
        return {layer: why for layer, why in self.doubts.items() if layer not in self.discarded}

    async def look(self, document: ImageDocument, wanted: Sequence[Layer]) -> str:
        self.asked.extend(wanted)
        await self.answers.wait()
        return "there is none"

    async def renew(self, layers: Sequence[Layer]) -> dict[Layer, str]:
        return {}

    async def discard(self, doubtful: dict[Layer, str]) -> str | None:
        if self.kept is None:
            self.discarded.extend(doubtful)
        return self.kept
