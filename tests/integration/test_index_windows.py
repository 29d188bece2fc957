"""An index that came alone, on a whole node with a real registry: windows come when needed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.bed.registry import Pusher
from snapshotter.image.index import LayerIndex
from snapshotter.indexes.artifact import ARTIFACT_TYPE
from snapshotter.indexes.keys import write_key_pair
from snapshotter.oci.documents import OCI_INDEX, OCI_MANIFEST
from snapshotter.oci.referrers import fallback_tag
from tests.cases.images import ImageCase, digest, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.indexes import MadeArtifact, artifact_of
from tests.integration.test_daemon_manners import node_on
from tests.integration.test_found_indexes import manifest_of
from tests.node import Node
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

FILES = 24
FILE_BYTES = 600_000
MIB = 1024 * 1024


def wordy(seed: int) -> bytes:
    """Bytes that compress to about a half, with windows worth their name."""
    chance = random.Random(seed)
    words = [chance.randbytes(12) for _ in range(3000)]
    return b"".join(chance.choices(words, k=FILE_BYTES // 12))


def large() -> ImageCase:
    files = {f"file-{n:02}": wordy(n) for n in range(FILES)}
    plain = layer(*(file(name.encode(), data) for name, data in files.items()))
    rows = {name: is_file(data) for name, data in files.items()}
    return image("windows apart", [gzipped(plain)], rows)


@dataclass
class Apart:
    """A node that was given the index of ``case`` and nothing else; windows lie in the registry."""

    node: Node
    case: ImageCase
    path: Path
    windows: bytes

    def reads_right(self, root: Path, name: str) -> str:
        return ended_well(reader(root / name, sha256_of(self.case, name)), 40)

    def sent_by(self, root: Path, name: str) -> int:
        registry = self.node.bed.registry
        before = registry.sent_bytes()
        assert self.reads_right(root, name) == ""
        return registry.sent_bytes() - before


def push_beside(node: Node, case: ImageCase, made: MadeArtifact) -> None:
    pusher = Pusher(node.bed.registry, case.repository)
    for blob in made.blobs:
        pusher.content(digest(blob), blob)
    pusher.manifest(str(made.digest), made.manifest)
    entry = {
        "mediaType": OCI_MANIFEST,
        "digest": str(made.digest),
        "size": len(made.manifest),
        "artifactType": ARTIFACT_TYPE,
    }
    listed = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
    pusher.manifest(fallback_tag(manifest_of(case)), json.dumps(listed).encode())


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    directory = tmp_path_factory.mktemp("apart")
    root = Path("/var/tmp") / f"ember-{directory.name}-windows"
    (directory / "trusted").mkdir()
    key = write_key_pair(directory / "key")
    shutil.copy(f"{directory / 'key'}.pub", directory / "trusted" / "key.pub")
    trusted = f'[index]\nforget_misses = 0\ntrusted_keys = "{directory / "trusted"}"\n'
    more = f"{trusted}[fetch]\nreadahead = 0\n"
    case = large()
    try:
        with node_on(directory, root, more, completion=False) as node:
            case.push(node.bed.registry)
            node.pull(case.reference)
            with node.mounted(case.chain_id):  # now it is indexed
                pass
            path = root / "index" / f"{case.stored[0].removeprefix('sha256:')}.idx"
            kept = directory / path.name
            shutil.copy(path, kept)
            shutil.copy(path.with_suffix(".win"), kept.with_suffix(".win"))
            made = artifact_of(case.documents[-1], [kept], keys=[key])
            push_beside(node, case, made)
            assert node.until(lambda: is_gone(node, case.reference, path))
            pulled = node.pull(case.reference)
            assert pulled.lazy_layers == 1, pulled.reason
            yield Apart(node, case, path, kept.with_suffix(".win").read_bytes())
    finally:
        shutil.rmtree(root, ignore_errors=True)


def is_gone(node: Node, reference: str, path: Path) -> bool:
    node.remove(reference)
    images = node.status()["images"]
    return not path.exists() and not any(reference in one["names"] for one in images)


def test_a_cold_read_fetches_its_chunks_and_their_window_and_no_more(apart: Apart) -> None:
    windows = apart.path.with_suffix(".win")
    assert not windows.exists()
    index = LayerIndex.open(apart.path)
    assert index.windows_bytes == len(apart.windows) > 100_000
    with apart.node.mounted(apart.case.chain_id) as root:
        sent = apart.sent_by(root, "file-15")
        stored = FILE_BYTES * index.blob_bytes / index.view_bytes
        assert stored < sent < stored + 1.5 * MIB
        assert sent < index.blob_bytes / 4
        here = [n for n in range(index.checkpoint_count) if index.local_window(index.checkpoint(n))]
        assert 1 <= len(here) <= 3
        assert windows.stat().st_blocks * 512 < len(apart.windows) / 2
        again = apart.sent_by(root, "file-15")
        assert again == 0


def test_a_window_that_the_registry_lost_costs_bytes_and_no_answer(apart: Apart) -> None:
    mark = len(apart.node.ember.log())
    with apart.node.mounted(apart.case.chain_id) as root:
        pusher = Pusher(apart.node.bed.registry, apart.case.repository)
        pusher.delete_blob(digest(apart.windows))
        try:
            assert apart.reads_right(root, "file-21") == ""
        finally:
            pusher.content(digest(apart.windows), apart.windows)
    assert "for want of a window of its index" in apart.node.ember.log()[mark:]


def test_the_whole_layer_can_be_had_without_its_windows(apart: Apart) -> None:
    node = apart.node
    assert node.until(lambda: not node.drop(apart.case.reference).kept)
    apart.path.with_suffix(".win").unlink()
    warmed = node.warm(apart.case.reference)
    assert warmed.done
    assert node.image(apart.case.reference)["here_bytes"] > FILES * FILE_BYTES
    with node.mounted(apart.case.chain_id) as root:
        said = [apart.reads_right(root, name) for name in sorted(apart.case.rows)]
        assert said == [""] * FILES
