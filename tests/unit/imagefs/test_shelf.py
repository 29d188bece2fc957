"""The shelf of indexes: bounded in what it keeps open, on disk, and in what a look costs."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from snapshotter.content import Digest
from snapshotter.errors import UnavailableError
from snapshotter.imagefs import shelf as shelf_module
from snapshotter.imagefs.shelf import BROKEN_KEPT, Shelf
from tests.fakes.lazy import digest
from tests.fakes.registry import sha256
from tests.unit.image.layers import index_of

ONE, TWO = b"one" * 5000, b"two" * 9000


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    for data in (ONE, TWO):
        index_of(data, data, tmp_path)
    return Shelf(tmp_path, lambda view: (), lambda blob: ())


def test_a_look_at_many_indexes_opens_none_for_good(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "OPEN_INDEXES", 1)
    opened = shelf.get(sha256(ONE))
    assert opened is not None
    seen = shelf.glance([sha256(TWO), sha256(ONE), digest("absent")])
    assert {blob: one.view_bytes for blob, one in seen.items()} == {
        sha256(ONE): len(ONE),
        sha256(TWO): len(TWO),
    }
    for blob, one in seen.items():
        assert one.disk_bytes == shelf.bytes_on_disk(blob) > 0
    assert shelf.get(sha256(ONE)) is opened


def test_a_look_at_what_is_torn_or_of_another_layer_sees_nothing(shelf: Shelf) -> None:
    torn, other = shelf.path(sha256(ONE)), shelf.path(digest("other"))
    other.write_bytes(shelf.path(sha256(TWO)).read_bytes())
    torn.write_bytes(torn.read_bytes()[:-1])
    assert shelf.glance([sha256(ONE), digest("other")]) == {}
    assert torn.exists()


@pytest.mark.parametrize("blob", [sha256(ONE), digest("other")])
def test_an_index_that_is_of_no_use_is_put_aside_and_goes_with_its_layer(
    shelf: Shelf, blob: Digest, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.path(blob).write_bytes(shelf.path(sha256(TWO)).read_bytes())
    assert shelf.get(blob) is None
    assert shelf.get(blob) is None
    assert [path.stem for path in shelf.directory.glob("*.broken")] == [blob.hex]
    assert caplog.text.count("put aside") == 1
    shelf.drop(blob)
    assert not list(shelf.directory.glob(f"{blob.hex}*"))


def test_only_the_last_few_broken_indexes_are_kept(shelf: Shelf) -> None:
    blobs = [digest(f"broken {n}") for n in range(BROKEN_KEPT + 3)]
    for n, blob in enumerate(blobs):
        shelf.path(blob).write_bytes(b"no index")
        os.utime(shelf.path(blob), (n, n))
        assert shelf.get(blob) is None
    left = {path.stem for path in shelf.directory.glob("*.broken")}
    assert left == {blob.hex for blob in blobs[3:]}


def test_whatever_lies_where_an_index_should_be_is_put_aside(shelf: Shelf) -> None:
    directory, pipe, loop = digest("directory"), digest("pipe"), digest("loop")
    (shelf.path(directory) / "inside").mkdir(parents=True)
    (shelf.path(directory).with_suffix(".broken") / "inside").mkdir(parents=True)
    os.mkfifo(shelf.path(pipe))
    shelf.path(loop).symlink_to(shelf.path(loop))
    blobs = [directory, pipe, loop]
    assert shelf.glance(blobs) == {}
    assert [shelf.get(blob) for blob in blobs] == [None, None, None]
    assert not any(os.path.lexists(shelf.path(blob)) for blob in blobs)
    for blob in blobs:
        shelf.drop(blob)
        assert not list(shelf.directory.glob(f"{blob.hex}*"))


def test_an_index_is_not_given_up_because_the_node_has_no_descriptor_left(
    shelf: Shelf,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(UnavailableError, match="just now"):
            shelf.get(sha256(ONE))
        assert shelf.glance([sha256(ONE)]) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert shelf.get(sha256(ONE)) is not None
