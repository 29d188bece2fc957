"""The real provider of lazy layers over two images in memory; its disk and its mounts are real.

One image's layer is given by its registry, the other's is not. No guard is needed: a view is
mounted only when all of it is here, as after every first pull.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ioengine import mounts
from ioengine.buffers import BufferPool
from ioengine.threads import ThreadEngine
from snapshotter.chunks.space import SpaceLimits
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.clock import SystemClock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import NotFoundError, UnauthorizedError
from snapshotter.fetch import Road
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import PIECE, Catalog, Layer
from snapshotter.imagefs.decision import Decider, ImageDocument, Policy
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.layers import Layers
from snapshotter.imagefs.metadata import MetadataImages
from snapshotter.imagefs.rates import Rates
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views
from snapshotter.snapshots import labels as known
from snapshotter.snapshots.claims import layer_claim
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.lazy import LayerClaim, LazyLayers
from tests.cases.tars import file, layer
from tests.fakes.lazy import digest
from tests.unit.imagefs.parts import Later, Origin, Others

REPOSITORY = "registry.example/app"
FILES = {"one": b"1" * 100_000, "two": b"2"}


class Library:
    """Manifests in memory."""

    def __init__(self) -> None:
        self.images: dict[Digest, ImageDocument] = {}

    async def image(self, namespace: str, manifest: Digest, reference: str) -> ImageDocument:
        if manifest not in self.images:
            raise NotFoundError(f"no image has manifest {manifest}")
        return self.images[manifest]


class Blobs:
    """A registry in memory that stands still while its gate is shut."""

    def __init__(self) -> None:
        self.data: dict[Digest, bytes] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def stream(self, blob: BlobRef) -> AsyncIterator[bytes]:
        await self.gate.wait()
        yield self.data[blob.digest]

    def suspect(self, blob: BlobRef) -> None:
        raise AssertionError(f"{blob.digest} came as it is, and is held for wrong")


class RealStage:
    """``Layers`` as the daemon puts it together, but for registries and containerd."""

    def __init__(self, library: Library, blobs: Blobs, layers: Layers) -> None:
        self._library = library
        self._blobs = blobs
        self.lazy: LazyLayers = layers
        self.shown = FILES
        self.lazy_claim = self._add("lazy", FILES)
        self.plain_claim = self._add("private", {"secret": b"s"})

    def hold_back(self, held: bool) -> None:
        if held:
            self._blobs.gate.clear()
        else:
            self._blobs.gate.set()

    def _add(self, name: str, files: dict[str, bytes]) -> LayerClaim:
        """An image of one layer, and what containerd says of it when it is to be unpacked."""
        data = layer(*(file(key.encode(), value) for key, value in files.items()))
        blob = Digest("sha256", hashlib.sha256(data).hexdigest())
        self._blobs.data[blob] = data
        only = Layer(blob, blob, blob, len(data))
        manifest = digest(f"manifest of {name}")
        reference = f"{REPOSITORY}:{name}"
        self._library.images[manifest] = ImageDocument(manifest, reference, REPOSITORY, (only,))
        labels = {
            known.SNAPSHOT_REF: str(blob),
            known.IMAGE_REF: reference,
            known.LAYER_DIGEST: str(blob),
            known.MANIFEST_DIGEST: str(manifest),
        }
        return layer_claim("default", str(blob), "", labels, (), False)


@asynccontextmanager
async def real_stage(directory: Path) -> AsyncIterator[RealStage]:
    """All of it in ``directory``; what is still mounted at the end is unmounted."""
    clock = SystemClock()
    async with AsyncExitStack() as undo:
        pool = undo.enter_context(ThreadPoolExecutor(2))
        database = await Database.open(directory / "ember.db", (PIECE,))
        undo.push_async_callback(database.close)
        catalog = Catalog(database)
        (directory / "index").mkdir()
        (directory / "metadata").mkdir()
        shelf = Shelf(directory / "index", catalog.layers_of_view, catalog.origins)
        store = await _open_store(directory, undo)
        road = Road(store, shelf, [])
        undo.push_async_callback(road.close)
        unmarked = directory / "views"
        views = Views(store, road, None, unmarked, unmarked, lambda view: None)
        blobs, library, origin = Blobs(), Library(), Origin()

        async def refused(blob: Digest, diff_id: Digest, reason: str) -> None:
            await catalog.blame(blob, diff_id, reason, clock.wall_ns())

        async def here(index: LayerIndex) -> bool:
            return await views.whole(index.diff_id)

        rates = Rates(10**9, clock)
        ingest = Ingest(blobs, views.stage, shelf.directory, refused, pool, clock, 2, rates, int)
        undo.push_async_callback(ingest.close)
        policy = Policy("stream", 60, 5, None)
        later = Later()
        decider = Decider(
            policy, catalog, shelf, library, origin, ingest, Others(), here, later.want, clock
        )
        metadata = MetadataImages(directory / "metadata")
        instances = LayerMounts(directory / "layers", views, metadata, pool, pool, directio=False)
        instances.restore(())
        undo.callback(_unmount_all, instances.directory)
        layers = Layers(decider, catalog, shelf, ingest, instances, views, Others(), clock)
        stage = RealStage(library, blobs, layers)
        private = stage.plain_claim.layer_digest
        assert private is not None
        origin.refused[private] = UnauthorizedError("no entry")
        yield stage
        assert not [m for m in mounts.mountinfo() if m.target.parent == instances.directory]


async def _open_store(directory: Path, undo: AsyncExitStack) -> ViewStore:
    engine = ThreadEngine.open(BufferPool(4, 64 * 1024), workers=2)
    undo.push_async_callback(engine.close)
    config = StoreConfig(directory, space=SpaceLimits(ballast_bytes=0, keep_free_bytes=0))
    store = ViewStore(config, engine, in_use=mounts.view_is_open)
    await store.start()
    undo.push_async_callback(store.close)
    return store


def _unmount_all(directory: Path) -> None:
    for mount in mounts.mountinfo():
        if mount.target.parent == directory:
            mounts.unmount(mount.target, detach=True)
