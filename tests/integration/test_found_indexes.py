"""Indexes that others made, on a whole node: found beside an image, trusted or not, used or not."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotter.content import Digest
from snapshotter.indexes.artifact import ARTIFACT_TYPE
from snapshotter.indexes.keys import SigningKey, write_key_pair
from snapshotter.oci.documents import OCI_INDEX, OCI_MANIFEST, digest_of
from snapshotter.oci.referrers import fallback_tag
from tests.cases.images import ImageCase
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import Change
from tests.indexes import MadeArtifact, artifact_of, offer
from tests.integration.registry_scene import Scene, noisy, read_all, scene_in
from tests.integration.test_warm import is_layer

pytestmark = [pytest.mark.root, pytest.mark.containerd]


class Found:
    """A scene whose node trusts the keys in ``trusted``."""

    def __init__(self, scene: Scene, directory: Path) -> None:
        self.scene = scene
        self.directory = directory
        self.trusted = directory / "trusted"

    def key(self, name: str, *, trusted: bool) -> SigningKey:
        path = self.directory / name
        made = write_key_pair(path)
        if trusted:
            shutil.copy(f"{path}.pub", self.trusted / f"{name}.pub")
        return made

    def built(self, case: ImageCase) -> list[Path]:
        """The image's index files as a node makes them, which forgets the image then."""
        scene = self.scene
        reference = scene.lazily(case)
        files = []
        for digest in case.stored[:2]:
            path = scene.node.ember.root / "index" / f"{hex_of(digest)}.idx"
            kept = self.directory / path.name
            shutil.copy(path, kept)
            if path.with_suffix(".win").exists():
                shutil.copy(path.with_suffix(".win"), kept.with_suffix(".win"))
            files.append(kept)
        assert scene.node.until(lambda: self.gone(reference))
        scene.registry.seen.clear()
        return files

    def gone(self, reference: str) -> bool:
        self.scene.node.remove(reference)
        images = self.scene.node.status()["images"]
        return not any(reference in image["names"] for image in images)

    def offer(self, case: ImageCase, made: Sequence[MadeArtifact]) -> str:
        registry = self.scene.registry
        offer(registry, case.repository, manifest_of(case), made)
        return f"{registry.authority}/{case.repository}:1"


def hex_of(digest: str) -> str:
    return digest.removeprefix("sha256:")


def manifest_of(case: ImageCase) -> Digest:
    return digest_of(case.documents[-1])


@contextlib.contextmanager
def found_in(directory: Path, more: str, *, registry: str = "", **options: Any) -> Iterator[Found]:
    """A scene whose node has ``more`` in its table [index], and ``registry`` in [registry]."""
    (directory / "trusted").mkdir(mode=0o755)
    index = f'{registry}[index]\ntrusted_keys = "{directory / "trusted"}"\n{more}'
    with scene_in(directory, lambda _: index, **options) as scene:
        yield Found(scene, directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    with found_in(tmp_path_factory.mktemp("found"), "") as made:
        yield made


@pytest.fixture(autouse=True)
def healed(found: Found) -> Iterator[None]:
    yield
    found.scene.registry.heal()
    found.scene.registry.seen.clear()


def slowly(delay_s: float) -> Change:
    """The answer's head comes late."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.head_delay_s = delay_s
        return answer

    return change


def listed(entries: list[dict[str, Any]]) -> bytes:
    """What a registry says refers to an image."""
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()


def signed(found: Found, case: ImageCase, name: str) -> str:
    files = found.built(case)
    key = found.key(name, trusted=True)
    return found.offer(case, [artifact_of(case.documents[-1], files, keys=[key])])


def test_a_signed_index_makes_an_image_lazy_before_any_of_its_layers_is_here(found: Found) -> None:
    case = noisy("signed elsewhere", 3_000_000)
    reference = signed(found, case, "good")
    pulled = found.scene.node.pull(reference)
    assert pulled.lazy_layers == 2, pulled.reason
    asked = [seen for seen in found.scene.registry.seen if is_layer(case)(seen)]
    assert all(seen.headers.get("range") == "bytes=0-0" for seen in asked)  # may we have it
    image = found.scene.node.image(reference)
    assert image["lookup"] == {"outcome": "found", "why": ""}
    assert {layer["index_from"]["origin"] for layer in image["layers"]} == {"signed"}
    with found.scene.node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
    asked = [seen for seen in found.scene.registry.seen if is_layer(case)(seen)]
    assert all("range" in seen.headers for seen in asked)


def test_an_unsigned_index_is_not_used_and_the_status_says_why(found: Found) -> None:
    case = noisy("not signed")
    files = found.built(case)
    reference = found.offer(case, [artifact_of(case.documents[-1], files)])
    pulled = found.scene.node.pull(reference)
    assert pulled.lazy_layers == 2  # streamed as ever
    with found.scene.node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
    image = found.scene.node.image(reference)
    assert image["lookup"]["outcome"] == "refused"
    assert "it is not signed" in image["lookup"]["why"]
    assert {layer["index_from"]["origin"] for layer in image["layers"]} == {"here"}


def test_a_registry_that_is_slow_to_list_referrers_holds_no_pull(found: Found) -> None:
    case = noisy("slow list")
    reference = signed(found, case, "slow")
    found.scene.registry.inject(
        slowly(20), lambda seen: fallback_tag(manifest_of(case)) in seen.path
    )
    started_s = time.monotonic()
    assert found.scene.node.pull(reference).lazy_layers == 2
    assert time.monotonic() - started_s < 8
    assert found.scene.node.image(reference)["lookup"]["outcome"] == "slow"
    with found.scene.node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]


def test_whoever_pulls_by_hand_has_it_looked_for_again(found: Found) -> None:
    case = noisy("pushed meanwhile")
    files = found.built(case)
    node, reference = found.scene.node, f"{found.scene.registry.authority}/{case.repository}:1"
    assert node.pull(reference).lazy_layers == 2
    assert node.image(reference)["lookup"]["outcome"] == "absent"
    assert node.until(lambda: found.gone(reference))
    key = found.key("meanwhile", trusted=True)
    found.offer(case, [artifact_of(case.documents[-1], files, keys=[key])])
    assert node.pull(reference).lazy_layers == 2
    assert node.image(reference)["lookup"]["outcome"] == "found"


def test_a_key_that_is_taken_away_ends_what_it_signed_but_not_what_is_mounted(
    found: Found,
) -> None:
    case = noisy("rotated", 2_000_000)
    reference = signed(found, case, "leaving")
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id) as root:
        (found.trusted / "leaving.pub").unlink()
        image = node.image(reference)
        assert all("lacks" in layer["index_from"]["fault"] for layer in image["layers"])
        assert read_all(found.scene, case, root) == ["", ""]
    node.containerd.ctr("images", "rm", "--sync", reference)
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
    image = node.image(reference)
    assert {layer["index_from"]["origin"] for layer in image["layers"]} == {"here"}


def test_a_key_that_is_taken_away_counts_for_no_container_after_the_last_one(found: Found) -> None:
    case = noisy("lost", 500_000)
    reference = signed(found, case, "lost")
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id):
        (found.trusted / "lost.pub").unlink()
        with node.mounted(case.chain_id):  # beside one that shows it
            layers = node.image(reference)["layers"]
            assert {layer["index_from"]["origin"] for layer in layers} == {"signed"}
    with node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
    layers = node.image(reference)["layers"]
    assert {layer["index_from"]["origin"] for layer in layers} == {"here"}


def test_a_key_that_was_changed_costs_a_new_mount_no_layer(found: Found) -> None:
    case = noisy("changed keys", 2_000_000)
    files = found.built(case)
    first = artifact_of(case.documents[-1], files, keys=[found.key("first", trusted=True)])
    reference = found.offer(case, [first])
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id):  # the layers stay mounted for who comes next
        pass
    second = found.key("second", trusted=True)
    found.offer(case, [first, artifact_of(case.documents[-1], files, keys=[second])])
    (found.trusted / "first.pub").unlink()
    found.scene.registry.seen.clear()
    with node.mounted(case.chain_id):
        asked = [seen for seen in found.scene.registry.seen if is_layer(case)(seen)]
        assert asked == []
        layers = node.image(reference)["layers"]
        assert {layer["index_from"]["key"] for layer in layers} == {second.key_id}
        assert {layer["index_from"]["fault"] for layer in layers} == {""}


def test_an_index_whose_note_was_torn_off_by_a_kill_is_not_taken_for_our_own(
    found: Found,
) -> None:
    """What a daemon leaves that is killed between the note and the index."""
    case = noisy("torn off")
    reference = signed(found, case, "torn")
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    index = node.ember.root / "index"
    notes = [index / f"{hex_of(digest)}.from" for digest in case.stored[:2]]
    assert all(note.exists() for note in notes)
    node.ember.kill()
    for note in notes:
        note.with_suffix(".idx").unlink()
    node.start_again()
    assert not any(note.exists() for note in notes)
    with node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
    image = node.image(reference)
    assert {layer["index_from"]["origin"] for layer in image["layers"]} == {"here"}


NOWHERE = f"sha256:{'0' * 64}"
ABSENT = {"mediaType": OCI_MANIFEST, "size": 400, "artifactType": ARTIFACT_TYPE}
LISTS: dict[str, tuple[bytes, str]] = {
    "empty": (listed([]), "absent"),
    "of what is not there": (listed([{**ABSENT, "digest": NOWHERE}]), "refused"),
    "of another type": (listed([{**ABSENT, "digest": NOWHERE, "artifactType": "x"}]), "absent"),
    "huge": (listed([{"annotations": {"x": "y" * 6_000_000}}]), "failed"),
    "no list": (b'{"schemaVersion": 2}', "failed"),
    "no JSON": (b"\0" * 1000, "failed"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_whatever_a_registry_lists_an_image_reads_right_and_the_status_says_what_it_was(
    found: Found, kind: str
) -> None:
    case = noisy(f"a list {kind}", 100_000)
    reference = found.scene.add(case)
    body, outcome = LISTS[kind]
    found.scene.registry.page(
        f"/v2/{case.repository}/referrers/{manifest_of(case)}",
        lambda seen: Answer(200, [("Content-Type", OCI_INDEX)], body),
    )
    assert found.scene.node.pull(reference).lazy_layers == 2
    with found.scene.node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
    assert found.scene.node.image(reference)["lookup"]["outcome"] == outcome
