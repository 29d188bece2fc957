"""Comparing an index with the bytes that it let in: what is right, and each way to be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotter.errors import UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.image.limits import ScanLimits
from snapshotter.imagefs.rederive import AbandonedError, Verdict, compare
from snapshotter.imagefs.rederiving import compare_apart, memory_bytes
from snapshotter.indexes.compare import shows_otherwise
from tests.indexes import Change, for_layer, laid_out_otherwise, with_set_uid, with_wrong_chunks
from tests.unit.imagefs.others import Elsewhere


class Scene:
    """A layer's index, and its view as it lies on the disk: with a tail of zeros."""

    def __init__(self, directory: Path) -> None:
        made = Elsewhere(directory, ("one",))
        self.layer = made.layers[0]
        self.path = directory / f"{self.layer.blob.hex}.idx"
        self.plain = made.plains[self.layer.diff_id]
        self.view = directory / "view"
        self.view.write_bytes(self.plain + bytes(4096))

    def index(self, change: Change = bytes) -> LayerIndex:
        data = change(self.path.read_bytes())
        return LayerIndex(memoryview(data), None, where="offered")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_right_index_is_found_right(scene: Scene) -> None:
    assert compare(scene.index(), scene.view) == Verdict(True, "")


def test_a_right_index_of_another_layout_is_found_right(scene: Scene) -> None:
    """As after an upgrade, of what came before it."""
    index = scene.index(laid_out_otherwise)
    assert compare(index, scene.view) == Verdict(True, "")
    assert not shows_otherwise(index, scene.index())
    lie = scene.index(lambda plain: laid_out_otherwise(with_set_uid(plain)))
    assert "its file system" in compare(lie, scene.view).fault
    assert shows_otherwise(lie, scene.index())


def test_other_rights_are_found(scene: Scene) -> None:
    verdict = compare(scene.index(with_set_uid), scene.view)
    assert verdict.bytes_right
    assert "its file system is not what the layer's tar holds" in verdict.fault


def test_a_wrong_chunk_digest_is_found_though_the_bytes_are_right(scene: Scene) -> None:
    verdict = compare(scene.index(with_wrong_chunks), scene.view)
    assert verdict == Verdict(True, "the digest of its chunk 0 is wrong")


def test_other_bytes_are_found_by_the_whole_digest(scene: Scene) -> None:
    scene.view.write_bytes(scene.plain[:-1024] + b"x" * 1024 + bytes(4096))
    verdict = compare(scene.index(), scene.view)
    assert not verdict.bytes_right
    assert str(scene.layer.diff_id) in verdict.fault


def test_an_index_made_out_to_be_of_another_view_is_found(scene: Scene, tmp_path: Path) -> None:
    other = Elsewhere(tmp_path / "other", ("other",)).layers[0]
    index = scene.index(lambda plain: for_layer(plain, other.blob, other.diff_id))
    assert not compare(index, scene.view).bytes_right


def test_a_view_that_goes_meanwhile_is_no_verdict(scene: Scene) -> None:
    scene.view.write_bytes(scene.plain[:1000])
    with pytest.raises(AbandonedError):
        compare(scene.index(), scene.view)


async def test_another_process_says_the_same(scene: Scene) -> None:
    assert await compare_apart(scene.path, scene.view) == Verdict(True, "")
    scene.path.write_bytes(with_set_uid(scene.path.read_bytes()))
    assert "its file system" in (await compare_apart(scene.path, scene.view)).fault
    scene.view.unlink()
    with pytest.raises(UnavailableError, match="went while"):
        await compare_apart(scene.path, scene.view)


def test_only_what_a_reader_would_see_is_a_difference(scene: Scene) -> None:
    index = scene.index()
    assert not shows_otherwise(index, scene.index())
    assert shows_otherwise(index, scene.index(with_set_uid))
    assert shows_otherwise(index, scene.index(with_wrong_chunks))


def test_the_memory_of_a_comparison_is_the_layers_not_what_the_index_says(
    scene: Scene,
) -> None:
    """A small index of a large layer could else never be found out."""
    small = memory_bytes(scene.path, scene.view)
    os.truncate(scene.view, 8 * 1024**3)
    large = memory_bytes(scene.path, scene.view)
    most = ScanLimits()
    assert large - small > 2048 * most.inodes + most.text_bytes
    os.truncate(scene.view, 1024**4)
    assert memory_bytes(scene.path, scene.view) == large
