"""Looking for indexes beside an image: which are taken, which are not and why, and how long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef
from snapshotter.errors import UnauthorizedError, UnavailableError
from snapshotter.imagefs import lookup as lookup_module
from snapshotter.imagefs.lookup import Found
from snapshotter.imagefs.provenance import (
    Origin,
)
from snapshotter.oci.documents import digest_of
from tests.unit.imagefs.others import REPOSITORY, Elsewhere, Looking, broken, here, look


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


async def test_of_many_artifacts_some_are_told_and_the_log_has_each(
    node: Looking, image: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        key = node.key(f"theirs {number}", trusted=False)
        node.beside.offer(image.document.manifest, image.artifact(key))
    outcome = await look(node, image)
    assert outcome.why.count("no key that is trusted here") == 2
    assert outcome.why.endswith("; 3 more, see the log")
    assert caplog.text.count("an index is not used: index artifact") == 5


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
