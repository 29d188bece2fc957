"""Which indexes count for which image: by who made them, where they lie, and what shares a view."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef
from snapshotter.image.indexer import LayerIndexer
from snapshotter.imagefs.catalog import PIECE, Catalog, Image, Layer
from snapshotter.imagefs.foreign import ForeignIndexes
from snapshotter.imagefs.lookup import Found
from snapshotter.imagefs.provenance import (
    BUILT_HERE,
    Origin,
    Provenance,
    decode,
    encode,
    remove_strays,
)
from snapshotter.imagefs.shelf import Shelf
from snapshotter.oci.documents import digest_of
from snapshotter.snapshots.database import Database
from tests.indexes import artifact_of, with_wrong_chunks
from tests.unit.image.layers import member
from tests.unit.imagefs.others import REPOSITORY, Elsewhere, Looking

OTHER = "registry.example/other"


class Discards:
    def __init__(self) -> None:
        self.asked: list[Layer] = []
        self.why = ""

    async def discard(self, layer: Layer) -> str:
        self.asked.append(layer)
        return self.why


class Scene:
    """An image of one repository whose layers have indexes here."""

    def __init__(self, database: Database, node: Looking, image: Elsewhere) -> None:
        self.catalog = Catalog(database)
        self.node = node
        self.image = image
        self.discards = Discards()
        self.reopen()

    def reopen(self) -> None:
        """As a daemon that begins anew."""
        directory, known = self.image.directory, self.catalog
        self.shelf = Shelf(directory, known.layers_of_view, known.origins)
        self.foreign = ForeignIndexes(self.catalog, self.shelf, self.node.trust, None)
        self.foreign.discards = self.discards

    async def remember(self, repository: str, layers: list[Layer]) -> None:
        manifest = digest_of(f"{repository} {layers}".encode())
        await self.catalog.remember(Image(manifest, (), (repository,), tuple(layers), True, "", 1))

    def come(self, origin: Provenance, number: int = 0) -> None:
        """The index of a layer came so."""
        self.shelf.vouch(self.image.layers[number].blob, origin)

    def doubted(self, repository: str) -> list[Layer]:
        return list(self.foreign.doubtful(self.image.document_in(repository)))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    database = await Database.open(tmp_path / "ember.db", (PIECE,))
    with ThreadPoolExecutor(1) as pool:
        node = Looking(tmp_path / "node", pool, "registry")
        yield Scene(database, node, Elsewhere(tmp_path / "index"))
    await database.close()


UNSIGNED = Provenance(Origin.REGISTRY, repositories=(REPOSITORY,))


@pytest.mark.parametrize(
    ("origin", "here", "there"),
    [
        (BUILT_HERE, True, True),
        (UNSIGNED, True, False),
        (replace(UNSIGNED, compared=True), True, True),
        (Provenance(Origin.UNKNOWN), False, False),
        (Provenance(Origin.SIGNED, "f" * 64, repositories=(REPOSITORY,)), True, False),
    ],
    ids=["built here", "unsigned", "compared", "unknown", "a key that has gone"],
)
async def test_an_index_counts_for_whom_it_may(
    scene: Scene, origin: Provenance, here: bool, there: bool
) -> None:
    scene.come(origin)
    layer = scene.image.layers[0]
    assert scene.doubted(REPOSITORY) == ([] if here else [layer])
    assert scene.doubted(OTHER) == ([] if there else [layer])


async def test_a_signature_of_a_trusted_key_counts_everywhere(scene: Scene) -> None:
    key = scene.node.key("ours")
    scene.come(Provenance(Origin.SIGNED, key.key_id, repositories=(REPOSITORY,)))
    assert scene.doubted(REPOSITORY) == scene.doubted(OTHER) == []


async def test_a_view_that_another_repositorys_index_fills_does_not_count_either(
    scene: Scene,
) -> None:
    """The same plain bytes in another packing: one view, and who fills it says what it holds."""
    packed = scene.image.layers[0]
    other = replace(packed, blob=digest_of(b"packed otherwise"))
    await scene.remember(REPOSITORY, [packed])
    await scene.remember(OTHER, [other])
    scene.come(UNSIGNED)
    document = replace(scene.image.document_in(OTHER), layers=(other,))
    assert list(scene.foreign.doubtful(document)) == [packed]
    assert list(scene.foreign.doubts_of([other])) == [packed]
    assert scene.foreign.doubts_of([packed]) == {}


async def test_what_does_not_count_goes_or_is_the_reason(scene: Scene) -> None:
    scene.come(UNSIGNED)
    doubtful = scene.foreign.doubtful(scene.image.document_in(OTHER))
    assert await scene.foreign.discard(doubtful) is None
    assert scene.discards.asked == [scene.image.layers[0]]
    scene.discards.why = "layer x: in use by a running container"
    reason = await scene.foreign.discard(doubtful)
    assert reason is not None
    assert "is not compared yet" in reason
    assert scene.discards.why in reason


async def test_what_nobody_vouches_for_is_the_last_to_say_what_a_view_holds(scene: Scene) -> None:
    first, second = scene.image.layers
    shared = replace(second, diff_id=first.diff_id)
    await scene.remember(REPOSITORY, [first, shared])
    scene.come(UNSIGNED)
    (source,) = scene.shelf.of_view(first.diff_id)
    assert source.index.layer == first.blob  # there is no other
    scene.come(BUILT_HERE)
    assert [each.index.layer for each in scene.shelf.of_view(first.diff_id)] == [first.blob]


@pytest.mark.parametrize("arriving", [False, True])
@pytest.mark.parametrize("lies", [False, True])
async def test_an_unsigned_index_must_agree_with_what_is_known_of_the_view(
    scene: Scene, tmp_path: Path, lies: bool, arriving: bool
) -> None:
    """Whoever opens the view next would let other bytes in."""
    node, own = scene.node, scene.image.layers[0]
    plain = scene.image.plains[own.diff_id]
    blob = member(plain, 9)
    packed = Layer(digest_of(blob), own.diff_id, own.chain_id, len(blob))
    with LayerIndexer(
        packed.blob, own.diff_id, blob_bytes=len(blob), sink=None, directory=tmp_path
    ) as indexer:
        indexer.feed(blob)
        indexer.finish()
    made = artifact_of(
        scene.image.manifest,
        [tmp_path / f"{packed.blob.hex}.idx"],
        change=with_wrong_chunks if lies else bytes,
    )
    node.beside.offer(scene.image.document.manifest, made)
    name = f"{own.blob.hex}.idx"
    if arriving:  # of an image that is just being decided on
        node.shelf.vouch(own.blob, replace(UNSIGNED, view=own.diff_id))
    else:
        node.views[own.diff_id] = (own.blob, packed.blob)
    (node.index / name).write_bytes((scene.image.directory / name).read_bytes())
    document = replace(scene.image.document, layers=(packed,))
    outcome = await node.lookup.look(document, [packed])
    assert outcome.found is (Found.REFUSED if lies else Found.FOUND)
    assert ("something else" in outcome.why) == lies
    assert (node.shelf.get(packed.blob) is None) == lies


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_filled_a_view_is_in_doubt_whatever_became_of_its_image(
    scene: Scene, restarted: bool
) -> None:
    """The image is forgotten while another one that shares the view keeps its bytes here."""
    packed = scene.image.layers[0]
    other = replace(packed, blob=digest_of(b"packed otherwise"))
    await scene.remember(OTHER, [other])
    scene.come(replace(UNSIGNED, view=packed.diff_id))
    if restarted:
        scene.reopen()
    document = replace(scene.image.document_in(OTHER), layers=(other,))
    assert list(scene.foreign.doubtful(document)) == [packed]
    scene.shelf.drop(packed.blob)
    assert scene.foreign.doubtful(document) == {}


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_index_that_nobody_vouched_for_leaves_its_doubt_behind(
    scene: Scene, restarted: bool
) -> None:
    """It is damaged, or of a version that is read no more; what it let in is here yet."""
    layer = scene.image.layers[0]
    scene.come(replace(UNSIGNED, view=layer.diff_id))
    path = scene.shelf.path(layer.blob)
    path.write_bytes(path.read_bytes()[:-1])
    assert scene.shelf.get(layer.blob) is None
    if restarted:
        remove_strays(scene.image.directory)
        scene.reopen()
    assert scene.doubted(REPOSITORY) == scene.doubted(OTHER) == [layer]
    scene.shelf.drop(layer.blob)
    assert scene.doubted(REPOSITORY) == []
    assert not path.with_suffix(".from").exists()


async def test_what_is_built_over_a_strangers_bytes_is_our_own_when_they_are_compared(
    scene: Scene,
) -> None:
    layer = scene.image.layers[0]
    scene.come(replace(UNSIGNED, view=layer.diff_id))
    scene.shelf.rebuilt(layer.blob)
    assert scene.doubted(OTHER) == [layer]
    scene.shelf.renewed(layer.blob)
    assert scene.doubted(OTHER) == []


@pytest.mark.parametrize(
    "text",
    ["", "\0" * 300, "[" * 60_000, '{"origin": "here"}', "here", '{"windows": {"size": 1e999}}'],
    ids=["empty", "zeros", "deep", "half", "a word", "endless"],
)
async def test_a_note_that_cannot_be_read_vouches_for_nothing(scene: Scene, text: str) -> None:
    layer = scene.image.layers[0]
    scene.shelf.path(layer.blob).with_suffix(".from").write_text(text)
    scene.reopen()
    assert scene.doubted(REPOSITORY) == [layer]


def test_a_length_without_end_is_no_length() -> None:
    whole = Provenance(Origin.SIGNED, "f" * 64, windows=BlobRef("r/n", digest_of(b"w"), 7))
    assert decode(encode(whole)) == whole
    assert decode(encode(whole).replace(b": 7", b": 1e999")) == Provenance(Origin.UNKNOWN)


async def test_a_note_whose_index_never_came_leaves_no_doubt(scene: Scene) -> None:
    """A kill, or a full disk, between the two: nothing was let in."""
    layer = scene.image.layers[0]
    scene.shelf.path(layer.blob).unlink()
    scene.come(replace(UNSIGNED, view=layer.diff_id))
    assert scene.doubted(OTHER) == []
    remove_strays(scene.image.directory)
    assert not scene.shelf.path(layer.blob).with_suffix(".from").exists()
