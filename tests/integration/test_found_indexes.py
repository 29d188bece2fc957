"""Indexes that others made, on a whole node: found beside an image, trusted or not, used or not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from snapshotter.content import Digest
from snapshotter.indexes.keys import SigningKey, write_key_pair
from snapshotter.oci.documents import digest_of
from tests.cases.images import ImageCase
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
            path = scene.node.ember.root / "index" / f"{digest.removeprefix('sha256:')}.idx"
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


def manifest_of(case: ImageCase) -> Digest:
    return digest_of(case.documents[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    directory = tmp_path_factory.mktemp("found")
    (directory / "trusted").mkdir(mode=0o755)
    index = f'[index]\ntrusted_keys = "{directory / "trusted"}"\n'
    with scene_in(directory, lambda _: index) as scene:
        yield Found(scene, directory)


@pytest.fixture(autouse=True)
def healed(found: Found) -> Iterator[None]:
    yield
    found.scene.registry.heal()
    found.scene.registry.seen.clear()


def test_a_signed_index_makes_an_image_lazy_before_any_of_its_layers_is_here(found: Found) -> None:
    case = noisy("signed elsewhere", 3_000_000)
    files = found.built(case)
    key = found.key("good", trusted=True)
    reference = found.offer(case, [artifact_of(case.documents[-1], files, keys=[key])])
    pulled = found.scene.node.pull(reference)
    assert pulled.lazy_layers == 2, pulled.reason
    whole = [s for s in found.scene.registry.seen if is_layer(case)(s) and "range" not in s.headers]
    assert not whole
    with found.scene.node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
