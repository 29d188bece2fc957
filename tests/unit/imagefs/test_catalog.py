"""The catalog of images: what is remembered survives, names move, and shared layers stay known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef
from snapshotter.imagefs.catalog import PIECE, Catalog, Image, Layer
from snapshotter.snapshots.database import Database
from tests.fakes.lazy import digest


def layer(name: str, view: str | None = None) -> Layer:
    return Layer(digest(name), digest(view or f"plain {name}"), digest(f"chain {name}"), 1000)


def image(name: str, *layers: Layer, repository: str = "r.example/app", seen_ns: int = 1) -> Image:
    return Image(digest(name), (f"{repository}:{name}",), (repository,), layers, True, "", seen_ns)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "ember.db", (PIECE,))
    yield opened
    await opened.close()


async def test_what_is_remembered_is_there_after_a_restart(database: Database) -> None:
    first = Catalog(database)
    await first.load()
    known = await first.remember(image("a", layer("1"), layer("2")))
    await first.blame(digest("bad"), digest("plain"), "a bomb", 5)
    second = Catalog(database)
    await second.load()
    assert second.images() == [known]
    assert second.fault(digest("bad"), digest("plain")) == "a bomb"
    assert second.fault(digest("bad"), digest("another plain")) is None
    assert second.origins(digest("2")) == [BlobRef("r.example/app", digest("2"), 1000)]


async def test_a_manifest_seen_again_elsewhere_gains_a_name_and_an_origin(
    database: Database,
) -> None:
    catalog = Catalog(database)
    await catalog.remember(image("a", layer("1")))
    await catalog.remember(image("a", layer("1"), repository="mirror.example/app", seen_ns=2))
    merged = catalog.image(digest("a"))
    assert merged is not None
    assert merged.names == ("mirror.example/app:a", "r.example/app:a")
    assert [ref.repository for ref in catalog.origins(digest("1"))] == [
        "mirror.example/app",
        "r.example/app",
    ]


async def test_a_tag_that_moves_names_only_the_new_image(database: Database) -> None:
    catalog = Catalog(database)
    old = image("a", layer("1"))
    await catalog.remember(old)
    await catalog.remember(replace(image("b", layer("2")), names=old.names))
    assert [found.manifest for found in catalog.find(old.names[0])] == [digest("b")]
    kept = catalog.image(digest("a"))
    assert kept is not None
    assert kept.names == ()


async def test_an_image_is_found_by_name_by_digest_and_by_its_beginning(
    database: Database,
) -> None:
    catalog = Catalog(database)
    known = await catalog.remember(image("a", layer("1")))
    for text in (known.names[0], str(known.manifest), known.manifest.hex[:8]):
        assert catalog.find(text) == [known]
    assert catalog.find(known.manifest.hex[:3]) == []
    assert catalog.find("r.example/other:a") == []


async def test_forgetting_an_image_keeps_layers_that_another_one_has(database: Database) -> None:
    catalog = Catalog(database)
    shared = layer("shared")
    await catalog.remember(image("a", shared, layer("own")))
    await catalog.remember(image("b", shared, repository="r.example/b"))
    await catalog.forget(digest("a"))
    assert catalog.image(digest("a")) is None
    assert catalog.origins(shared.blob) == [BlobRef("r.example/b", shared.blob, 1000)]
    assert list(catalog.layers_of_view(shared.diff_id)) == [shared.blob]
    assert catalog.origins(digest("own")) == []
    assert list(catalog.layers_of_view(layer("own").diff_id)) == []


async def test_two_blobs_of_one_view_are_both_its_sources(database: Database) -> None:
    catalog = Catalog(database)
    await catalog.remember(image("a", layer("gzip", "plain")))
    await catalog.remember(image("b", layer("zstd", "plain"), repository="r.example/b"))
    assert set(catalog.layers_of_view(digest("plain"))) == {digest("gzip"), digest("zstd")}


async def test_an_image_that_is_leaving_does_so_after_a_restart_unless_it_is_named_again(
    database: Database,
) -> None:
    catalog = Catalog(database)
    for name in ("a", "b", "c"):
        await catalog.remember(image(name, layer(name)))
        await catalog.leave(digest(name))
    await catalog.remember(image("b", layer("b"), seen_ns=2))
    await catalog.stay(digest("c"))
    await catalog.leave(digest("unknown"))
    again = Catalog(database)
    await again.load()
    assert [each.manifest for each in again.images() if each.leaving] == [digest("a")]
    assert {each.manifest for each in again.images()} == {digest(name) for name in "abc"}


async def test_what_was_unpacked_and_is_not_refused_is_known_by_its_repository(
    database: Database,
) -> None:
    catalog = Catalog(database)
    await catalog.remember(image("lazy", layer("1")))
    plain = image("v1", layer("2"), layer("bad"), repository="r.example:5000/team/app")
    await catalog.remember(replace(plain, lazy=False, reason="no index yet"))
    await catalog.blame(digest("bad"), digest("plain bad"), "a bomb", 5)
    assert list(catalog.unpacked_layers()) == [("r.example:5000/team/app", layer("2"))]


async def test_faults_of_layers_are_known_up_to_a_number(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotter.imagefs.catalog.FAULTS_KEPT", 4)
    first = Catalog(database)
    for number in (*range(6), 5):
        await first.blame(digest(f"b{number}"), digest("view"), "bad", number)
    second = Catalog(database)
    await second.load()
    for catalog in (first, second):
        known = [n for n in range(6) if catalog.fault(digest(f"b{n}"), digest("view"))]
        assert known == [2, 3, 4, 5]


async def test_changes_at_the_same_time_lose_nothing_of_each_other(database: Database) -> None:
    catalog = Catalog(database)
    await catalog.load()
    one = image("a", layer("1"))
    await asyncio.gather(
        *(
            catalog.remember(
                replace(one, names=(f"r{n}.example/app:1",), repositories=(f"r{n}.example/app",))
            )
            for n in range(10)
        )
    )
    known = catalog.image(digest("a"))
    assert known is not None
    assert (len(known.names), len(known.repositories)) == (10, 10)
    await asyncio.gather(catalog.leave(digest("a")), catalog.touch(digest("a"), 50))
    left = catalog.image(digest("a"))
    assert left is not None
    assert (left.leaving, left.seen_ns) == (True, 50)


async def test_what_was_seen_since_is_not_forgotten(database: Database) -> None:
    catalog = Catalog(database)
    await catalog.load()
    await catalog.remember(image("a", layer("1"), seen_ns=5))
    again = asyncio.create_task(catalog.remember(image("a", layer("1"), seen_ns=9)))
    await asyncio.sleep(0)
    assert not await catalog.forget(digest("a"), 5)
    await again
    assert catalog.image(digest("a")) is not None
    assert await catalog.forget(digest("a"), 9)
    assert catalog.image(digest("a")) is None
