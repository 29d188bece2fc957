"""Looking for indexes beside an image: which are taken, which are not and why, and how long."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import NoSpaceError, UnauthorizedError, UnavailableError
from snapshotter.imagefs import lookup as lookup_module
from snapshotter.imagefs.lookup import Found, Outcome
from snapshotter.imagefs.provenance import (
    BUILT_HERE,
    Origin,
    Provenance,
    read_provenance,
    remove_strays,
)
from snapshotter.oci.documents import digest_of
from tests.indexes import artifact_of
from tests.unit.imagefs.others import REPOSITORY, Elsewhere, Looking

OTHER = "registry.example/other"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, pool: ThreadPoolExecutor) -> Looking:
    return Looking(tmp_path / "node", pool)


@pytest.fixture
def image(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path / "elsewhere")


async def look(node: Looking, image: Elsewhere, repository: str = REPOSITORY) -> Outcome:
    return await node.lookup.look(image.document_in(repository), image.layers)


def here(node: Looking, image: Elsewhere) -> list[bool]:
    return [node.shelf.get(layer.blob) is not None for layer in image.layers]


async def test_what_a_trusted_key_signed_is_here_for_all_layers_with_its_origin(
    node: Looking, image: Elsewhere
) -> None:
    key = node.key("ours")
    made = image.artifact(key)
    node.beside.offer(image.document.manifest, made)
    assert (await look(node, image)).found is Found.FOUND
    assert here(node, image) == [True, True]
    for again in range(2):
        for layer in image.layers:
            origin = node.shelf.provenance(layer.blob)
            assert (origin.origin, origin.key, origin.artifact, origin.compared) == (
                Origin.SIGNED,
                key.key_id,
                made.digest,
                False,
            ), again
        node.start()  # the note survives a restart


async def test_what_arrives_is_to_the_byte_what_was_built_elsewhere(
    node: Looking, image: Elsewhere
) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    await look(node, image)
    for layer in image.layers:
        own = node.shelf.path(layer.blob)
        assert own.read_bytes() == (image.directory / own.name).read_bytes()


async def test_the_windows_of_what_arrives_stay_where_they_are_until_they_are_needed(
    tmp_path: Path, pool: ThreadPoolExecutor, image: Elsewhere
) -> None:
    node = Looking(tmp_path / "node", pool)
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    await look(node, image)
    for layer in image.layers:
        other = image.directory / f"{layer.blob.hex}.win"
        windows = node.shelf.provenance(layer.blob).windows_at
        assert not node.shelf.path(layer.blob).with_suffix(".win").exists()
        if other.exists():
            size = other.stat().st_size
            assert windows == (BlobRef(REPOSITORY, digest_of(other.read_bytes()), size),)
    assert any((image.directory / f"{layer.blob.hex}.win").exists() for layer in image.layers)


@pytest.mark.parametrize("signed", [False, True])
async def test_what_nobody_trusted_signed_is_not_used_and_says_so_once(
    node: Looking, image: Elsewhere, signed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [node.key("theirs", trusted=False)] if signed else []
    node.beside.offer(image.document.manifest, image.artifact(*keys))
    for _ in range(2):
        outcome = await look(node, image)
        assert outcome.found is Found.REFUSED
        assert ("no key that is trusted here" if signed else "not signed") in outcome.why
        node.lookup.forget(image.document.manifest)
    assert here(node, image) == [False, False]
    assert caplog.text.count("is not used") == 1
    assert node.beside.streamed == []


async def test_a_signature_taken_from_another_image_is_refused(
    node: Looking, image: Elsewhere, tmp_path: Path
) -> None:
    key = node.key("ours")
    other = Elsewhere(tmp_path / "other", ("other",)).artifact(key)
    own = image.artifact(key)
    replayed = own.manifest.replace(
        str(digest_of(own.blobs[-1])).encode(), str(digest_of(other.blobs[-1])).encode()
    )
    size = f'"size":{len(own.blobs[-1])}'.encode()
    replayed = replayed.replace(size, f'"size":{len(other.blobs[-1])}'.encode())
    node.beside.offer(image.document.manifest, other)
    node.beside.lists.clear()
    node.beside.offer(image.document.manifest, replace(own, manifest=replayed))
    outcome = await look(node, image)
    assert outcome.found is Found.REFUSED
    assert "taken from another artifact" in outcome.why


async def test_an_artifact_of_another_image_is_refused_and_the_next_one_is_used(
    node: Looking, image: Elsewhere, tmp_path: Path
) -> None:
    key = node.key("ours")
    other = Elsewhere(tmp_path / "other", ("other",)).artifact(key)
    node.beside.offer(image.document.manifest, other, image.artifact(key))
    assert (await look(node, image)).found is Found.FOUND


def broken(plain: bytes) -> bytes:
    return plain[:520] + bytes([plain[520] ^ 1]) + plain[521:]


async def test_a_broken_one_is_passed_over_for_a_sound_one(node: Looking, image: Elsewhere) -> None:
    key = node.key("ours")
    bad, good = image.artifact(key, change=broken), image.artifact(key)
    node.beside.offer(image.document.manifest, bad, good)
    assert (await look(node, image)).found is Found.FOUND
    origins = {node.shelf.provenance(layer.blob).artifact for layer in image.layers}
    assert origins == {good.digest}


async def test_an_index_that_is_broken_is_refused_with_the_reason_and_leaves_nothing(
    node: Looking, image: Elsewhere
) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours"), change=broken))
    outcome = await look(node, image)
    assert outcome.found is Found.REFUSED
    assert "checksum" in outcome.why
    assert here(node, image) == [False, False]
    assert not [p for p in node.shelf.directory.iterdir() if p.suffix in (".idx", ".from")]


async def test_an_artifact_for_some_layers_gives_those(node: Looking, image: Elsewhere) -> None:
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours"), only=1))
    assert (await look(node, image)).found is Found.PARTLY
    assert here(node, image) == [True, False]


async def test_nothing_beside_an_image_is_remembered_for_a_while(
    node: Looking, image: Elsewhere
) -> None:
    for _ in range(3):
        assert (await look(node, image)).found is Found.ABSENT
    assert node.beside.asked == 1
    await node.clock.advance(601)
    await look(node, image)
    assert node.beside.asked == 2


async def test_another_key_ends_what_is_remembered(node: Looking, image: Elsewhere) -> None:
    key = node.key("late", trusted=False)
    node.beside.offer(image.document.manifest, image.artifact(key))
    assert (await look(node, image)).found is Found.REFUSED
    (node.keys / "late.pub").write_bytes((node.directory / "late.pub").read_bytes())
    assert (await look(node, image)).found is Found.FOUND


@pytest.mark.parametrize("error", [UnavailableError("503"), UnauthorizedError("401")])
async def test_a_registry_that_fails_is_remembered_too(
    node: Looking, image: Elsewhere, error: UnavailableError
) -> None:
    node.beside.error = error
    for _ in range(2):
        outcome = await look(node, image)
        assert (outcome.found, outcome.why) == (Found.FAILED, str(error))
    assert node.beside.asked == 1
    await node.clock.advance(61)  # sooner than what surely is not there
    await look(node, image)
    assert node.beside.asked == 2


async def test_a_slow_lookup_holds_nobody_and_what_it_brings_is_kept(
    node: Looking, image: Elsewhere
) -> None:
    node.start(budget_s=0.05)
    node.beside.answers.clear()
    node.beside.offer(image.document.manifest, image.artifact(node.key("ours")))
    first, second = await asyncio.gather(look(node, image), look(node, image))
    assert first.found is second.found is Found.SLOW
    node.beside.answers.set()
    async with asyncio.timeout(10):
        await node.over.wait()
    assert node.ended[-1] == "found"
    assert here(node, image) == [True, True]
    assert node.beside.asked == 1


async def test_so_many_slow_lookups_are_under_way_and_no_more(
    node: Looking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "LOOKUPS", 1)
    node.start(budget_s=0.01)
    node.beside.answers.clear()
    one, two = (Elsewhere(tmp_path / name, (name,)) for name in ("one", "two"))
    assert (await look(node, one)).found is Found.SLOW
    assert (await look(node, two)).found is Found.BUSY
    await node.lookup.close()
    assert node.beside.asked == 1


@pytest.mark.parametrize("same_layers", [True, False])
async def test_a_registry_that_hangs_leaves_room_for_others(
    node: Looking,
    image: Elsewhere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    same_layers: bool,
) -> None:
    monkeypatch.setattr(lookup_module, "LOOKUPS", 1)
    monkeypatch.setattr(lookup_module, "LAYERS_AT_ONCE", 1)
    slow, key = "slow.example/app", node.key("ours")
    other = image if same_layers else Elsewhere(tmp_path / "other", ("one", "two"))
    node.beside.offer(image.document.manifest, image.artifact(key), repository=slow)
    node.beside.offer(other.document.manifest, other.artifact(key))
    node.beside.hangs = "slow.example/"
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(look(node, image, slow))
        await node.beside.hanging.wait()
        assert (await look(node, other)).found is Found.FOUND
        assert here(node, other) == [True, True]
        third = Elsewhere(tmp_path / "third", ("three",))
        assert (await look(node, third, slow)).found is Found.BUSY
        node.beside.goes_on.set()
        assert (await waiting).found is Found.FOUND
    assert here(node, image) == [True, True]
    origins = {node.shelf.provenance(layer.blob).repositories for layer in image.layers}
    assert origins == {(REPOSITORY,) if same_layers else (slow,)}


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
