"""Metadata images: made for the chain where a layer needs one, whatever digest its view has."""

from __future__ import annotations

import gc
import hashlib
import os
import stat
from pathlib import Path

import pytest

from snapshotter.content import Digest
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import LayerIndexer
from snapshotter.image.scan import device_tag
from snapshotter.imagefs.metadata import CHAINS_KEPT, MetadataImages
from snapshotter.snapshots.lazy import StackEntry
from tests.cases.tars import directory, file, layer

BELOW = layer(directory(b"opt", mode=0o750))
ABOVE = layer(file(b"opt/tool/run", b"x" * 1000))


def index_of(plain: bytes, folder: Path, algorithm: str) -> LayerIndex:
    blob = Digest("sha256", hashlib.sha256(plain).hexdigest())
    view = Digest(algorithm, hashlib.new(algorithm, plain).hexdigest())
    with LayerIndexer(blob, view, blob_bytes=len(plain), sink=None, directory=folder) as indexer:
        indexer.feed(plain)
        return indexer.finish()


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_layer_that_needs_its_chain_gets_an_image_of_it(tmp_path: Path, algorithm: str) -> None:
    lower = tmp_path / "lower"
    (lower / "opt").mkdir(parents=True, mode=0o750)
    index = index_of(ABOVE, tmp_path, algorithm)
    assert index.needs_chain
    images = MetadataImages(tmp_path)
    entry = StackEntry(1, "below", lower, None, None, None)
    made = images.of(index, [(entry, "")])
    assert made.path.exists()
    assert made.key.startswith(index.layer.hex)
    assert images.of(index, [(entry, "")]) == made


def test_what_lies_below_is_not_kept_open(tmp_path: Path) -> None:
    """A deleted file that is open keeps its room on the disk, and a descriptor."""
    images = MetadataImages(tmp_path)
    below, above = (index_of(plain, tmp_path, "sha256") for plain in (BELOW, ABOVE))
    key = images.of(below, []).key
    entry = StackEntry(1, "below", tmp_path, below.layer, None, below.diff_id)
    gc.disable()
    try:
        assert images.of(above, [(entry, key)]).key != above.layer.hex
        names = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    finally:
        gc.enable()
    assert images.path(key) not in names


def test_the_image_that_another_index_of_the_layer_gave_is_made_anew(tmp_path: Path) -> None:
    """A stranger's index was found wrong, and a kill came before its image was removed."""
    index = index_of(BELOW, tmp_path, "sha256")
    images = MetadataImages(tmp_path)
    path = images.path(index.layer.hex)
    for other in (with_mode(index), b"", index.erofs[:-1]):
        path.write_bytes(other)
        assert images.of(index, []).path == path
        assert path.read_bytes() == index.erofs
    before = path.stat().st_ino
    images.of(index, [])
    assert path.stat().st_ino == before


def test_a_chain_is_of_the_very_images_that_it_was_made_of(tmp_path: Path) -> None:
    """Not of what another index had said of the layer, or of one below."""
    images = MetadataImages(tmp_path)
    below, above = (index_of(plain, tmp_path, "sha256") for plain in (BELOW, ABOVE))
    lower = images.of(below, [])
    stack = [(StackEntry(1, "below", tmp_path, below.layer, None), lower.key)]
    made = images.of(above, stack).path
    assert images.of(above, stack).path == made
    lower.path.unlink()
    lower.path.write_bytes(with_mode(below))
    other = images.of(above, stack).path
    assert other != made
    assert other.read_bytes() != made.read_bytes()
    lower.path.unlink()
    images.of(below, [])
    assert images.of(above, stack).path == made


def with_mode(index: LayerIndex) -> bytes:
    tree = ErofsReader(index.erofs).tree()
    tree.root.children[b"opt"].mode |= stat.S_ISUID
    tag = device_tag(index.diff_id)
    return bytes(write_erofs(tree, device_bytes=index.view_bytes, device_tag=tag))


def test_only_the_chains_used_last_are_remembered(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    (lower / "opt").mkdir(parents=True, mode=0o750)
    index = index_of(ABOVE, tmp_path, "sha256")
    folder = tmp_path / "images"
    folder.mkdir()
    images = MetadataImages(folder)

    def on(snapshot: int) -> Path:
        return images.of(index, [(StackEntry(snapshot, "below", lower, None, None, None), "")]).path

    first = on(0)
    os.utime(first, (0, 0))
    second = on(1)
    os.utime(second, (1, 1))
    for n in range(2, CHAINS_KEPT):
        os.utime(on(n), (n, n))
    assert first == on(0)
    assert first.exists() and second.exists()
    last = on(CHAINS_KEPT)
    assert first.exists() and last.exists() and not second.exists()
    assert len(list(folder.iterdir())) == CHAINS_KEPT
    assert on(1) == second and second.exists()


def test_what_a_killed_daemon_was_writing_goes_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "ab.123.tmp").write_bytes(b"half")
    (tmp_path / "ab.erofs").write_bytes(b"whole")
    MetadataImages(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ab.erofs"]
