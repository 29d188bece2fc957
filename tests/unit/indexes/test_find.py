"""Finding and fetching: what is signed is found among what is not, and lies are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.errors import CorruptError, EmberError, RefusedError, UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.indexes.artifact import ARTIFACT_TYPE, PLATFORM, SIGNERS, SMALL_BYTES
from snapshotter.indexes.fetched import fetch_into
from snapshotter.indexes.find import CANDIDATE_LIMIT, find
from snapshotter.indexes.keys import Keyring
from snapshotter.oci.documents import OCI_MANIFEST
from tests.fakes.registry import answer_with, cut, flip, sha256
from tests.unit.indexes.scenes import CASE, KEY, RING, Scene, build_into, new_key, scene


def _other_artifact(scene: Scene, number: int, **more: object) -> None:
    """An artifact of the same type and image, and no good."""
    assert scene.published is not None
    found = scene.registry.repository(CASE.repository)
    document = json.loads(found.manifests[str(scene.published.digest)][0])
    notes = {"number": str(number), SIGNERS: KEY.key_id}  # it claims to be as good as the best
    document.update({"annotations": notes, **more})
    data = json.dumps(document).encode()
    manifests = found.manifests
    found.manifests = {str(sha256(data)): (data, OCI_MANIFEST), **manifests}


async def test_nothing_is_found_of_an_image_that_nobody_indexed(tmp_path: Path) -> None:
    async with scene(tmp_path, key=None) as bed:
        findings = await find(bed.client, bed.pinned, RING)
        assert (findings.found, findings.refused, findings.signed) == ((), (), None)


@pytest.mark.parametrize("api", [True, False])
async def test_what_a_trusted_key_signed_is_found(tmp_path: Path, api: bool) -> None:
    async with scene(tmp_path, api=api) as bed:
        findings = await find(bed.client, bed.pinned, RING)
        assert findings.signed is not None and bed.published is not None
        assert findings.signed.key_id == KEY.key_id
        assert findings.signed.digest == bed.published.digest
        assert findings.signed.artifact == bed.published.artifact


async def test_it_is_found_among_artifacts_that_are_no_good(tmp_path: Path) -> None:
    async with scene(tmp_path) as bed:
        for number in range(3):
            _other_artifact(bed, number, artifactType=ARTIFACT_TYPE)
        findings = await find(bed.client, bed.pinned, RING)
        assert findings.signed is not None
        assert len(findings.refused) == 3
        assert all("dev.ember.platform" in reason for reason in findings.refused)


async def test_the_search_among_them_ends(tmp_path: Path) -> None:
    async with scene(tmp_path) as bed:
        for number in range(CANDIDATE_LIMIT + 5):
            _other_artifact(bed, number)
        bed.registry.seen.clear()
        findings = await find(bed.client, bed.pinned, RING)
        assert findings.signed is None
        assert len(bed.registry.asked("/manifests/")) == CANDIDATE_LIMIT


async def test_what_names_a_trusted_key_is_looked_at_first(tmp_path: Path) -> None:
    """Many rotations later there are more artifacts than are looked at."""
    async with scene(tmp_path, key=new_key()) as bed:
        for _ in range(CANDIDATE_LIMIT + 1):
            await build_into(bed.client, bed.image, tmp_path / "cache", [], new_key())
        await build_into(bed.client, bed.image, tmp_path / "cache", [])
        bed.registry.seen.clear()
        found = (await find(bed.client, bed.pinned, RING)).signed
        assert found is not None and found.artifact.signers == (KEY.key_id,)
        assert len(bed.registry.asked("/manifests/")) == 1


async def test_a_name_is_no_signature(tmp_path: Path) -> None:
    async with scene(tmp_path, key=new_key()) as bed:
        _other_artifact(bed, 1, annotations={PLATFORM: "linux/amd64", SIGNERS: KEY.key_id})
        findings = await find(bed.client, bed.pinned, RING)
        assert (findings.signed, len(findings.found)) == (None, 2)


async def test_strangers_signatures_are_told_of(tmp_path: Path) -> None:
    async with scene(tmp_path, key=new_key()) as bed:
        findings = await find(bed.client, bed.pinned, RING)
        assert findings.signed is None
        assert "no key that is trusted here" in findings.reasons
        assert (await find(bed.client, bed.pinned, Keyring({}))).signed is None


async def test_the_trusted_one_of_two_builders_is_taken(tmp_path: Path) -> None:
    async with scene(tmp_path, key=new_key()) as bed:
        await build_into(bed.client, bed.image, tmp_path / "cache", [])
        findings = await find(bed.client, bed.pinned, RING, every=True)
        assert len(findings.found) == 2
        assert findings.found[0].key_id == KEY.key_id
        assert findings.found[1].key_id is None


async def test_a_signature_that_is_gone_is_no_signature(tmp_path: Path) -> None:
    async with scene(tmp_path) as bed:
        assert bed.published is not None and bed.published.artifact.envelope is not None
        envelope = str(bed.published.artifact.envelope.digest)
        bed.registry.inject(answer_with(404), lambda seen: envelope in seen.target)
        findings = await find(bed.client, bed.pinned, RING)
        assert findings.signed is None
        assert envelope in findings.reasons


async def test_a_registry_in_trouble_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as bed:
        bed.registry.inject(answer_with(500), lambda seen: "/manifests/" in seen.path)
        with pytest.raises(UnavailableError):
            await find(bed.client, bed.pinned, RING)


async def _fetch(bed: Scene, number: int = 0) -> Path:
    found = (await find(bed.client, bed.pinned, RING)).signed
    assert found is not None
    layer = bed.image.layers[number]
    target = bed.directory / "fetched"
    target.mkdir(exist_ok=True)
    return await fetch_into(bed.client, found, layer, target)


async def test_what_is_fetched_is_what_was_built(tmp_path: Path) -> None:
    async with scene(tmp_path) as bed:
        path = await _fetch(bed)
        built = tmp_path / "cache" / path.name
        for suffix in (".idx", ".win"):
            assert path.with_suffix(suffix).read_bytes() == built.with_suffix(suffix).read_bytes()
        assert LayerIndex.open(path).layer == bed.image.layers[0].digest


@pytest.mark.parametrize("blob", ["packed", "windows"])
async def test_lying_blobs_leave_nothing_behind(tmp_path: Path, blob: str) -> None:
    async with scene(tmp_path) as bed:
        assert bed.published is not None
        content = getattr(bed.published.artifact.layers[0], blob)
        named = str(content.digest)
        for change in (flip(20), cut(15), answer_with(404)):
            bed.registry.heal()
            bed.registry.inject(change, lambda seen: named in seen.target)
            with pytest.raises(EmberError):
                await _fetch(bed)
            assert list((tmp_path / "fetched").iterdir()) == []


async def test_a_signed_index_of_another_layer_is_still_refused(tmp_path: Path) -> None:
    """Trust is not enough: a signer may err, and the node must not fall."""
    async with scene(tmp_path) as bed:
        found = (await find(bed.client, bed.pinned, RING)).signed
        assert found is not None
        other = replace(bed.image.layers[0], size=17)
        target = tmp_path / "fetched"
        target.mkdir()
        with pytest.raises(RefusedError, match="length of the layer"):
            await fetch_into(bed.client, found, other, target)
        assert list(target.iterdir()) == []


@pytest.mark.parametrize("part", ["packed", "plain", "windows"])
async def test_what_is_longer_than_its_layer_is_not_begun_with(tmp_path: Path, part: str) -> None:
    """Whoever can push beside an image could fill the disks of all who check it."""
    async with scene(tmp_path) as bed:
        found = (await find(bed.client, bed.pinned, RING)).signed
        assert found is not None
        first, second = found.artifact.layers
        content = getattr(first, part)
        long = replace(first, **{part: replace(content, size_bytes=SMALL_BYTES + 1)})
        bent = replace(found, artifact=replace(found.artifact, layers=(long, second)))
        target = tmp_path / "fetched"
        target.mkdir()
        bed.registry.seen.clear()
        with pytest.raises(RefusedError, match=f"{SMALL_BYTES + 1} bytes, more than the layer"):
            await fetch_into(bed.client, bent, bed.image.layers[0], target)
        assert (bed.registry.seen, list(target.iterdir())) == ([], [])


async def test_bytes_that_are_not_those_that_were_promised_are_named(tmp_path: Path) -> None:
    async with scene(tmp_path) as bed:
        assert bed.published is not None
        first, second = bed.published.artifact.layers
        blobs = bed.registry.repository(CASE.repository).blobs
        blobs[str(first.packed.digest)] = blobs[str(second.packed.digest)].ljust(
            first.packed.size_bytes, b"\0"
        )
        with pytest.raises(CorruptError, match=f"index of layer {first.layer}"):
            await _fetch(bed)
