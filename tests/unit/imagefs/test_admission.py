"""What is here is shown to an image whose repository gives it, and to no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.content import BlobRef
from snapshotter.errors import NotFoundError, UnauthorizedError, UnavailableError
from snapshotter.imagefs.admission import ASKED_AT_ONCE, Admission
from snapshotter.imagefs.catalog import PIECE, Catalog, Image, Layer
from snapshotter.snapshots.database import Database
from tests.fakes.lazy import digest
from tests.unit.imagefs.parts import Origin, layer

OURS, THEIRS = "registry.example/ours", "registry.example/theirs"
LAYERS = (layer("one"), layer("two"), layer("three"))


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    opened = await Database.open(tmp_path / "ember.db", (PIECE,))
    yield Catalog(opened)
    await opened.close()


def let_in(repository: str, *layers: Layer) -> Image:
    return Image(digest(repository), (f"{repository}:1",), (repository,), layers, True, "", 1)


async def test_only_layers_that_the_repository_has_not_given_are_asked_for(
    catalog: Catalog,
) -> None:
    origin = Origin()
    await catalog.remember(let_in(OURS, *LAYERS[:2]))
    await catalog.remember(let_in(THEIRS, LAYERS[2]))
    await Admission(catalog, origin).check(OURS, LAYERS)
    assert origin.given == [BlobRef(OURS, LAYERS[2].blob, 1000)]


async def test_what_was_let_in_before_needs_no_registry(catalog: Catalog) -> None:
    origin = Origin()
    origin.refused = {each.blob: UnavailableError("down") for each in LAYERS}
    await catalog.remember(let_in(OURS, *LAYERS))
    await Admission(catalog, origin).check(OURS, LAYERS)
    with pytest.raises(UnavailableError, match="down"):
        await Admission(catalog, origin).check(THEIRS, LAYERS)


@pytest.mark.parametrize("error", [UnauthorizedError("403"), NotFoundError("404")])
async def test_one_layer_that_is_not_given_is_enough(
    catalog: Catalog, error: NotFoundError | UnauthorizedError
) -> None:
    origin = Origin()
    origin.refused = {LAYERS[1].blob: error}
    with pytest.raises(type(error), match="40"):
        await Admission(catalog, origin).check(OURS, LAYERS)


async def test_a_bounded_number_is_asked_for_at_once_and_nothing_goes_on_afterwards(
    catalog: Catalog,
) -> None:
    asked: list[BlobRef] = []

    class Silent:
        async def gives(self, blob: BlobRef) -> None:
            asked.append(blob)
            await asyncio.Event().wait()

    many = [layer(f"layer {n}") for n in range(3 * ASKED_AT_ONCE)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Admission(catalog, Silent()).check(OURS, many)
    assert len(asked) == ASKED_AT_ONCE
    assert len(asyncio.all_tasks()) == 1
