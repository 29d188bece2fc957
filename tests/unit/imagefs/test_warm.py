"""Warm images: shared, ended with the last who wants them, never given past a registry's word."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import (
    CorruptError,
    DeadlineError,
    EmberError,
    FailedPreconditionError,
    NoSpaceError,
    NotFoundError,
    UnauthorizedError,
)
from snapshotter.fetch import Tally
from snapshotter.imagefs.catalog import PIECE, Catalog, Image, Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views as RealViews
from snapshotter.imagefs.warm import LAYERS_AT_ONCE, Warmer
from snapshotter.snapshots.database import Database
from tests.fakes.lazy import digest
from tests.unit.fetch.conftest import until
from tests.unit.imagefs.first_pulls import Scene, plain_layer, sha256
from tests.unit.imagefs.parts import REFERENCE, Origin

REPOSITORY = "registry.example/app"
CONTENT = bytes(range(256)) * 4000
PLAIN = plain_layer(CONTENT)


class Views(RealViews):
    """Of each view, how much is here."""

    def __init__(self) -> None:
        self.here: dict[Digest, int] = {}
        self.keeping: list[Digest] = []

    @contextlib.asynccontextmanager
    async def keep(self, view: Digest) -> AsyncIterator[None]:
        self.keeping.append(view)
        try:
            yield
        finally:
            self.keeping.remove(view)

    async def whole(self, view: Digest) -> bool:
        return self.here.get(view, 0) >= len(PLAIN)

    def here_bytes(self, view: Digest) -> int | None:
        return self.here.get(view)


class Road:
    """Completes views in the steps that a test lets it take."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self.gate = asyncio.Event()
        self.gate.set()
        self.script: list[tuple[int, Exception | None]] = []
        """What is here after each call, and how it ends."""
        self.asked: list[tuple[Digest, int]] = []
        self.running = 0

    async def complete(self, view_id: Digest, *, at_once: int) -> None:
        self.asked.append((view_id, at_once))
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        here, error = self.script.pop(0) if self.script else (len(PLAIN), None)
        self._views.here[view_id] = here
        if error is not None:
            raise error

    def tally(self, view_id: Digest) -> Tally:
        return Tally()


class Stage:
    """A warmer over a real first pull, a real catalog and a road that does as it is told."""

    def __init__(self, catalog: Catalog, scene: Scene, directory: Path) -> None:
        self.catalog, self.scene = catalog, scene
        self.views, self.origin = Views(), Origin()
        self.road = Road(self.views)
        self.hindrance: str | None = None
        self.shelf = Shelf(directory, catalog.layers_of_view, catalog.origins)
        self.warmer = Warmer(
            catalog,
            self.shelf,
            scene.ingest,
            self.views,
            self.road,
            self.origin,
            lambda document: self.hindrance,
            scene.clock,
        )

    def document(self, *names: str, manifest: str = "manifest") -> ImageDocument:
        """An image of gzip layers, each of one file with its name."""
        layers = []
        for name in names:
            plain = plain_layer(CONTENT, name or "file")
            blob = self.scene.add(gzip.compress(plain, mtime=0))
            layers.append(Layer(blob.digest, sha256(plain), digest(name), blob.size_bytes))
        return ImageDocument(digest(manifest), REFERENCE, REPOSITORY, tuple(layers))

    async def warm(self, document: ImageDocument) -> None:
        async with self.warmer.warming(document) as warming:
            while not await warming.wait(5):
                pass

    def known(self) -> Image:
        (image,) = self.catalog.images()
        return image


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
async def stage(tmp_path: Path, pool: ThreadPoolExecutor) -> AsyncIterator[Stage]:
    database = await Database.open(tmp_path / "ember.db", (PIECE,))
    directory = tmp_path / "index"
    directory.mkdir()
    scene = Scene(directory, pool)
    yield Stage(Catalog(database), scene, directory)
    await scene.ingest.close()
    await database.close()


async def test_a_layer_without_an_index_is_streamed_and_the_rest_completed(stage: Stage) -> None:
    document = stage.document("")
    (layer,) = document.layers
    await stage.warm(document)
    assert stage.scene.opened == 1
    assert stage.shelf.get(layer.blob) is not None
    assert [view for view, _ in stage.road.asked] == [layer.diff_id]
    assert stage.views.keeping == []
    known = stage.known()
    assert (known.lazy, known.repositories, known.layers) == (True, (REPOSITORY,), document.layers)
    await stage.warm(document)
    assert stage.scene.opened == 1


async def test_two_who_want_it_share_the_work_and_one_may_go(stage: Stage) -> None:
    document = stage.document("")
    stage.scene.gate.clear()
    first = asyncio.create_task(stage.warm(document))
    second = asyncio.create_task(stage.warm(document))
    works = stage.warmer._works
    await until(lambda: [work.wanted for work in works.values()] == [2])
    await until(lambda: stage.scene.opened == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stage.scene.gate.set()
    await second
    assert stage.scene.opened == 1
    assert len(stage.road.asked) == 1


async def test_a_registry_that_hangs_holds_up_its_own_images_only(stage: Stage) -> None:
    many = stage.document(*(f"layer{n}" for n in range(LAYERS_AT_ONCE + 1)))
    one = replace(stage.document("", manifest="one"), repository="other.example/app")
    stage.road.gate.clear()
    warming = [asyncio.create_task(stage.warm(each)) for each in (many, one)]
    await until(lambda: stage.road.running == LAYERS_AT_ONCE + 1)
    assert one.layers[0].diff_id in [view for view, _ in stage.road.asked]
    stage.road.gate.set()
    await asyncio.gather(*warming)


async def test_what_nobody_wants_any_more_ends(stage: Stage) -> None:
    document = stage.document("", "other")
    stage.scene.gate.clear()
    alone = asyncio.create_task(stage.warm(document))
    await until(lambda: stage.scene.opened == 2)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    await until(lambda: not stage.scene.ingest.jobs())
    assert all(staged.discarded for staged in stage.scene.staged)
    assert stage.views.keeping == []
    stage.scene.gate.set()
    await stage.warm(document)
    assert stage.scene.opened == 4


async def test_a_first_pull_that_a_pod_waits_for_goes_on(stage: Stage) -> None:
    document = stage.document("")
    (layer,) = document.layers
    stage.scene.gate.clear()
    alone = asyncio.create_task(stage.warm(document))
    await until(lambda: stage.scene.opened == 1)
    job = stage.scene.ingest.start(BlobRef(REPOSITORY, layer.blob, layer.size_bytes), layer.diff_id)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    stage.scene.gate.set()
    assert await stage.scene.ingest.wait(job, 10)
    assert stage.scene.opened == 1


async def test_one_that_is_wanted_again_while_it_ends_waits_for_that(stage: Stage) -> None:
    (layer,) = stage.document("").layers
    blob = BlobRef(REPOSITORY, layer.blob, layer.size_bytes)
    stage.scene.gate.clear()
    async with stage.scene.ingest.wanted(blob, layer.diff_id) as first:
        await until(lambda: stage.scene.opened == 1)
    second = stage.scene.ingest.start(blob, layer.diff_id)
    assert second is not first
    stage.scene.gate.set()
    assert await stage.scene.ingest.wait(second, 10)
    assert stage.scene.has_index(blob)
    assert [staged.discarded for staged in stage.scene.staged] == [True, False]


async def test_what_a_repository_does_not_give_is_not_warmed_though_it_is_here(
    stage: Stage,
) -> None:
    await stage.warm(stage.document("secret"))
    theirs = stage.document("secret", manifest="another")
    theirs = ImageDocument(theirs.manifest, "evil.example/a:1", "evil.example/a", theirs.layers)
    stage.origin.refused[theirs.layers[0].blob] = UnauthorizedError("401")
    with pytest.raises(UnauthorizedError):
        await stage.warm(theirs)
    assert not any("evil" in place for place in stage.known().repositories)


async def test_where_nothing_can_be_lazy_nothing_is_brought(stage: Stage) -> None:
    stage.hindrance = "no lazy data path: this kernel is old"
    with pytest.raises(FailedPreconditionError, match="app:1 cannot be lazy here: no lazy data"):
        await stage.warm(stage.document(""))
    assert stage.scene.opened == 0
    assert stage.catalog.images() == []


async def test_a_plain_overlay_image_stays_one_until_it_is_pulled_again(stage: Stage) -> None:
    document = stage.document("")
    seen = Image(document.manifest, (REFERENCE,), (), document.layers, False, "no labels", 1)
    await stage.catalog.remember(seen)
    await stage.warm(document)
    assert (stage.known().lazy, stage.known().reason) == (False, "no labels")


async def test_a_layer_that_is_refused_says_so_of_its_image(stage: Stage) -> None:
    (layer,) = stage.document("").layers
    wrong = Layer(layer.blob, digest("another plain"), layer.chain_id, layer.size_bytes)
    document = ImageDocument(digest("manifest"), REFERENCE, REPOSITORY, (wrong,))
    with pytest.raises(EmberError, match="the image is wrong"):
        await stage.warm(document)
    assert not stage.known().lazy
    assert "the image is wrong" in stage.known().reason


@pytest.mark.parametrize("error", [NoSpaceError("no space"), CorruptError("wrong"), OSError("io")])
async def test_the_first_fault_ends_it_and_is_told(stage: Stage, error: Exception) -> None:
    document = stage.document("", "other")
    for layer in document.layers:
        blob = BlobRef(REPOSITORY, layer.blob, layer.size_bytes)
        assert await stage.scene.ingest.wait(stage.scene.ingest.start(blob, layer.diff_id), 10)
    stage.road.script = [(0, error)]
    with pytest.raises(type(error), match=str(error)):
        await stage.warm(document)
    assert stage.road.running == 0
    assert stage.views.keeping == []


async def test_a_deadline_is_only_the_end_if_nothing_came(stage: Stage) -> None:
    document = stage.document("")
    late = DeadlineError("not in 300 s")
    stage.road.script = [(100, late), (200, late), (300, None)]
    await stage.warm(document)
    stage.views.here.clear()
    stage.road.script = [(300, None), (300, late)]
    with pytest.raises(DeadlineError, match="not in 300 s"):
        await stage.warm(document)


async def test_a_layer_whose_index_goes_meanwhile_is_brought_nevertheless(stage: Stage) -> None:
    document = stage.document("")
    blob = document.layers[0].blob
    stage.road.script = [(100, NotFoundError("no layer is known"))]
    stage.road.gate.clear()
    warming = asyncio.create_task(stage.warm(document))
    await until(lambda: stage.road.running == 1)
    stage.shelf.drop(blob)
    stage.road.gate.set()
    await warming
    assert stage.shelf.get(blob) is not None
    assert stage.views.here == {document.layers[0].diff_id: len(PLAIN)}


async def test_an_image_that_is_removed_meanwhile_is_not_brought_back(stage: Stage) -> None:
    document = stage.document("")
    stage.road.gate.clear()
    warming = asyncio.create_task(stage.warm(document))
    await until(lambda: stage.road.running == 1)
    await stage.catalog.forget(document.manifest)
    stage.road.gate.set()
    with pytest.raises(NotFoundError, match="removed meanwhile"):
        await warming


async def test_progress_tells_how_far_each_layer_is(stage: Stage) -> None:
    document = stage.document("", "other")
    async with stage.warmer.warming(document) as warming:
        assert not await warming.wait(0)
        assert {layer.state for layer in warming.progress()} <= {"waiting", "fetching"}
        while not await warming.wait(5):
            pass
        done = warming.progress()
    assert [layer.state for layer in done] == ["here", "here"]
    assert all(layer.done_bytes == layer.size_bytes == layer.fetched_bytes for layer in done)


async def test_indexes_are_looked_for_before_anything_is_streamed(stage: Stage) -> None:
    seen: list[tuple[str, int]] = []

    async def look_up(document: ImageDocument) -> None:
        seen.append((document.reference, stage.scene.opened))

    stage.warmer.look_up = look_up
    await stage.warm(stage.document(""))
    assert seen == [(REFERENCE, 0)]
