"""Indexes of others come in: whose they are, what they displace, what a crash leaves of them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import Digest
from snapshotter.errors import NoSpaceError
from snapshotter.imagefs.lookup import Found
from snapshotter.imagefs.provenance import (
    BUILT_HERE,
    Origin,
    Provenance,
    read_provenance,
    remove_strays,
)
from tests.indexes import artifact_of
from tests.unit.imagefs.others import REPOSITORY, Elsewhere, Looking, broken, here, look

OTHER = "registry.example/other"


async def test_a_layer_that_is_being_built_here_takes_no_index_from_elsewhere(
    node: Looking, image: Elsewhere
) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    node.building = {image.layers[0].blob}
    assert (await look(node, image)).found is Found.PARTLY
    assert here(node, image) == [False, True]


async def test_an_artifact_that_lied_once_is_never_used_again(
    node: Looking, image: Elsewhere
) -> None:
    made = image.artifact(node.key("ours"))
    node.beside.offer(image.document.manifest, made)
    node.condemned[made.digest] = "it was wrong"
    outcome = await look(node, image)
    assert outcome.found is Found.REFUSED
    assert "it was wrong" in outcome.why


async def test_unsigned_ones_count_by_leave_alone_and_only_where_they_were_offered(
    node: Looking, image: Elsewhere
) -> None:
    node.start("registry")
    node.beside.offer(image.document.manifest, image.artifact())
    assert (await look(node, image)).found is Found.FOUND
    ring = node.trust.keys.read()
    origin = node.shelf.provenance(image.layers[0].blob)
    assert origin.origin is Origin.REGISTRY
    assert node.trust.fault(origin, REPOSITORY, ring) is None
    assert "is not compared yet" in str(node.trust.fault(origin, OTHER, ring))
    compared = replace(origin, compared=True)
    assert node.trust.fault(compared, OTHER, ring) is None
    node.start("signed")
    assert "no longer" in str(node.trust.fault(origin, REPOSITORY, ring))


async def test_the_same_index_offered_in_two_places_counts_for_both(
    node: Looking, image: Elsewhere
) -> None:
    node.start("registry")
    manifest = image.document.manifest
    node.beside.offer(manifest, image.artifact())
    node.beside.offer(manifest, image.artifact(), repository=OTHER)
    assert (await look(node, image)).found is Found.FOUND
    assert (await look(node, image, OTHER)).found is Found.FOUND
    for layer in image.layers:
        assert node.shelf.provenance(layer.blob).repositories == (REPOSITORY, OTHER)


async def test_another_index_of_the_layer_from_elsewhere_takes_no_place(
    node: Looking, image: Elsewhere, tmp_path: Path
) -> None:
    """Who can push to one repository must not decide what another's layers mean."""
    node.start("registry")
    manifest = image.document.manifest
    node.beside.offer(manifest, image.artifact())
    await look(node, image)
    before = [node.shelf.path(layer.blob).read_bytes() for layer in image.layers]
    flat = artifact_of(
        image.manifest,
        [image.directory / f"{layer.blob.hex}.idx" for layer in image.layers],
        change=broken,
    )
    node.beside.offer(manifest, flat, repository=OTHER)
    assert (await look(node, image, OTHER)).found is Found.REFUSED
    assert [node.shelf.path(layer.blob).read_bytes() for layer in image.layers] == before


async def test_a_new_key_takes_over_what_an_old_one_signed(node: Looking, image: Elsewhere) -> None:
    manifest = image.document.manifest
    node.beside.offer(manifest, image.artifact(node.key("old")))
    await look(node, image)
    new = node.key("new")
    node.distrust("old")
    ring, blob = node.trust.keys.read(), image.layers[0].blob
    assert "which" in str(node.trust.fault(node.shelf.provenance(blob), REPOSITORY, ring))
    node.beside.lists.clear()
    node.beside.offer(manifest, image.artifact(new))
    node.beside.streamed.clear()
    assert (await look(node, image)).found is Found.FOUND
    assert node.shelf.provenance(blob).key == new.key_id
    assert node.trust.fault(node.shelf.provenance(blob), REPOSITORY, ring) is None
    assert node.beside.streamed == []


async def test_a_full_disk_is_a_reason_and_no_error(
    node: Looking, image: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))

    def full(*arguments: object) -> None:
        raise NoSpaceError("no space left")

    monkeypatch.setattr(node.shelf, "vouch", full)
    outcome = await look(node, image)
    assert outcome.found is Found.REFUSED
    assert "no space left" in outcome.why
    assert here(node, image) == [False, False]


async def test_what_is_cut_off_between_the_note_and_the_index_is_never_our_own(
    node: Looking, image: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note comes first, so nothing that is left looks as if this node had built it."""
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    seen = []

    def cut_off(source: Path, target: Path) -> None:
        seen.append((target.exists(), node.shelf.provenance(image.layers[0].blob).origin))
        raise OSError(errno.EIO, "cut off")

    monkeypatch.setattr(os, "link", cut_off)
    await look(node, image)
    assert seen
    assert not any(there for there, _ in seen)
    notes = [node.shelf.path(layer.blob).with_suffix(".from") for layer in image.layers]
    assert all(note.exists() for note in notes)
    assert here(node, image) == [False, False]
    remove_strays(node.index)
    assert not any(note.exists() for note in notes)
    monkeypatch.undo()
    node.start()
    assert (await look(node, image)).found is Found.FOUND


async def test_what_this_node_builds_itself_is_its_own_from_then_on(
    node: Looking, image: Elsewhere
) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    await look(node, image)
    blob = image.layers[0].blob
    node.shelf.renewed(blob)
    for _ in range(2):
        assert node.shelf.provenance(blob).origin is Origin.HERE
        node.start()


async def test_a_note_that_is_damaged_vouches_for_nothing(node: Looking, image: Elsewhere) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    await look(node, image)
    blob = image.layers[0].blob
    note = node.shelf.path(blob).with_suffix(".from")
    whole = note.read_bytes()
    for cut in range(len(whole)):
        note.write_bytes(whole[:cut])
        assert not read_provenance(node.shelf.path(blob)).own, cut
    node.shelf.drop(blob)
    assert not list(node.index.glob(f"{blob.hex}*"))


@pytest.mark.parametrize("meanwhile", ["drop", "renewed"])
async def test_an_index_that_goes_while_it_arrives_never_passes_for_our_own(
    node: Looking, image: Elsewhere, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Its image is removed, or the layer is built here, between the note and the index."""
    shelf, layer, loop = node.shelf, image.layers[0], asyncio.get_running_loop()
    vouch, step = shelf.vouch, getattr(shelf, meanwhile)

    def overtaken(blob: Digest, provenance: Provenance) -> None:
        vouch(blob, provenance)
        if blob == layer.blob:
            done = threading.Event()
            if meanwhile == "renewed":
                shelf.path(blob).write_bytes((image.directory / f"{blob.hex}.idx").read_bytes())
            loop.call_soon_threadsafe(step, blob)
            loop.call_soon_threadsafe(done.set)
            assert done.wait(10)

    monkeypatch.setattr(shelf, "vouch", overtaken)
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    await look(node, image)
    assert (shelf.get(layer.blob) is not None) == (meanwhile == "renewed")
    assert read_provenance(shelf.path(layer.blob)) == BUILT_HERE == shelf.provenance(layer.blob)
    assert shelf.provenance(image.layers[1].blob).origin is Origin.SIGNED
