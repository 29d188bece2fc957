"""Pushing what was built here: once for each image, behind all else, to nobody's harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import (
    ConfigError,
    EmberError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from snapshotter.imagefs import verdicts as verdict_tables
from snapshotter.imagefs.catalog import PIECE, Catalog, Image
from snapshotter.imagefs.provenance import Origin, Provenance, write_provenance
from snapshotter.imagefs.sharing import WAITS_S, Placed, Sharing
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.verdicts import Verdicts
from snapshotter.indexes.publish import LocalIndex
from snapshotter.snapshots.database import Database
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.imagefs.first_pulls import Scene as FirstPulls
from tests.unit.imagefs.others import REPOSITORY, Elsewhere


class Registry:
    """Takes pushes, unless it has ``errors`` left; ``there``: what is pushed lies there already."""

    def __init__(self) -> None:
        self.errors: list[EmberError] = []
        self.there = False
        self.trusted: list[str] | None = None
        self.lacks: set[Digest] = set()
        self.had: list[str] = []
        self.asked: list[tuple[str, Digest, list[Digest]]] = []
        self.at_once = self.most_at_once = 0

    async def gives(self, blob: BlobRef) -> None:
        self.had.append(blob.repository)
        if blob.digest in self.lacks:
            raise NotFoundError(f"{blob.digest}: 404")

    def keys(self) -> Collection[str] | None:
        return self.trusted

    async def publish(
        self, repository: str, image: Digest, indexes: Sequence[LocalIndex]
    ) -> Placed:
        self.asked.append((repository, image, [one.index.layer for one in indexes]))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        for _ in range(50):  # everybody else's turn
            await asyncio.sleep(0)
        self.at_once -= 1
        if self.errors:
            raise self.errors.pop(0)
        return Placed(not self.there, self.trusted[0] if self.trusted else "")


class Scene:
    """A node that has built the indexes of one image."""

    def __init__(self, database: Database, image: Elsewhere, pool: ThreadPoolExecutor) -> None:
        self.image = image
        self.catalog = Catalog(database)
        self.verdicts = Verdicts(database)
        self.shelf = Shelf(image.directory, lambda view: (), lambda blob: ())
        self.registry = Registry()
        self.clock = SkippingClock()
        self.ended: list[str] = []
        self.over = asyncio.Event()
        self.ingest = FirstPulls(image.directory, pool).ingest

    async def remember(self, image: Elsewhere) -> None:
        document = image.document
        await self.catalog.remember(
            Image(document.manifest, (), (REPOSITORY,), document.layers, True, "", 1)
        )

    def sharing(self) -> Sharing:
        return Sharing(
            self.catalog,
            self.shelf,
            self.ingest,
            self.verdicts,
            self.registry,
            self.clock,
            self._count,
        )

    def _count(self, outcome: str) -> None:
        self.ended.append(outcome)
        self.over.set()

    async def end(self) -> str:
        async with asyncio.timeout(10):
            await self.over.wait()
        return self.ended[-1]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    database = await Database.open(tmp_path / "ember.db", (PIECE, verdict_tables.PIECE))
    with ThreadPoolExecutor(1) as pool:
        made = Scene(database, Elsewhere(tmp_path / "index"), pool)
        await made.remember(made.image)
        yield made
    await database.close()


async def test_an_image_whose_layers_were_all_built_here_is_pushed_once(scene: Scene) -> None:
    for again in range(2):  # the second daemon knows
        sharing = scene.sharing()
        sharing.start()
        sharing.built(scene.image.layers[0].blob)
        sharing.built(scene.image.layers[1].blob)
        assert await scene.end() == "pushed", again
        await sharing.stop()
        await scene.verdicts.load()
    document = scene.image.document
    layers = [layer.blob for layer in document.layers]
    assert scene.registry.asked == [(REPOSITORY, document.manifest, layers)]


async def test_what_lies_there_already_is_not_pushed_and_not_asked_for_again(scene: Scene) -> None:
    scene.registry.there = True
    sharing = scene.sharing()
    sharing.start()
    assert await scene.end() == "there"
    assert scene.verdicts.pushed(scene.image.document.manifest, REPOSITORY) == ""
    await sharing.stop()


async def test_what_may_pass_is_tried_again_with_rising_waits(scene: Scene) -> None:
    scene.registry.errors = [UnavailableError("503")] * len(WAITS_S)
    sharing = scene.sharing()
    sharing.start()
    assert await scene.end() == "pushed"
    assert len(scene.registry.asked) == len(WAITS_S) + 1
    assert scene.ended == ["pushed"]
    await sharing.stop()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnauthorizedError("403: no push"), "refused"),
        (ConfigError("signing key /k: there is no such file"), "refused"),
        (UnavailableError("503"), "failed"),
    ],
)
async def test_what_the_registry_will_not_have_is_said_once_and_left(
    scene: Scene, error: EmberError, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene.registry.errors = [error] * 10
    sharing = scene.sharing()
    sharing.start()
    assert await scene.end() == outcome
    tries = len(scene.registry.asked)
    sharing.built(scene.image.layers[0].blob)
    await sharing.stop()
    assert len(scene.registry.asked) == tries
    assert caplog.text.count("are not pushed") == 1
    assert str(error) in caplog.text


@pytest.mark.parametrize("compared", [False, True])
async def test_an_image_with_a_layer_from_elsewhere_is_not_pushed(
    scene: Scene, compared: bool
) -> None:
    foreign = Provenance(Origin.SIGNED, "k" * 64, repositories=(REPOSITORY,), compared=compared)
    write_provenance(scene.shelf.path(scene.image.layers[1].blob), foreign)
    own = Elsewhere(scene.image.directory, ("own",))
    await scene.remember(own)
    sharing = scene.sharing()
    sharing.start()
    assert await scene.end() == "pushed"
    await sharing.stop()
    assert [image for _, image, _ in scene.registry.asked] == [own.document.manifest]


async def test_what_is_tried_again_waits_its_turn(scene: Scene) -> None:
    """Images go one at a time, and none beside a first pull, also when they come again."""
    other = Elsewhere(scene.image.directory, ("own",))
    await scene.remember(other)
    scene.registry.errors = [UnavailableError("503"), UnavailableError("503")]
    sharing = scene.sharing()
    sharing.start()
    async with asyncio.timeout(10):
        while len(scene.ended) < 2:
            scene.over.clear()
            await scene.over.wait()
    assert scene.ended == ["pushed", "pushed"]
    assert (scene.registry.most_at_once, len(scene.registry.asked)) == (1, 4)
    await sharing.stop()


async def test_what_only_a_key_of_earlier_days_signed_is_pushed_anew(scene: Scene) -> None:
    """Unsigned, then signed, then by a new key: before the old one goes, and after it went."""
    for trusted, pushes in ((None, 1), (["old"], 2), (["old", "new"], 2), (["new"], 3)):
        scene.registry.trusted = trusted
        await scene.verdicts.load()
        scene.over.clear()
        sharing = scene.sharing()
        sharing.start()
        if len(scene.registry.asked) < pushes:
            assert await scene.end() == "pushed"
        for _ in range(300):  # time enough for one more
            await asyncio.sleep(0)
        sharing.built(scene.image.layers[0].blob)
        await sharing.stop()
        assert len(scene.registry.asked) == pushes, trusted


@pytest.mark.parametrize("lacks", [0, 1, None])
async def test_a_repository_that_does_not_give_a_layer_gets_no_index_of_it(
    scene: Scene, lacks: int | None
) -> None:
    """A manifest can name any layer, also one of somebody else's that this node has indexed."""
    document = scene.image.document
    await scene.catalog.forget(document.manifest)
    names = ("thief.example/app:1",)
    await scene.catalog.remember(
        Image(document.manifest, names, (), document.layers, False, "refused", 1)
    )
    if lacks is not None:
        scene.registry.lacks = {document.layers[lacks].blob}
    sharing = scene.sharing()
    sharing.start()
    assert await scene.end() == ("pushed" if lacks is None else "refused")
    await sharing.stop()
    assert len(scene.registry.asked) == (1 if lacks is None else 0)
    assert set(scene.registry.had) == {"thief.example/app"}
