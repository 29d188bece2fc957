"""Mounts as the kernel makes them: binds, EROFS over plain files, and who has a view open."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ioengine import mounts
from ioengine.probe_image import FILE_NAME, probe_image

pytestmark = pytest.mark.root
LENGTH = 64 * 1024


@pytest.fixture
def place() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="ember mounts ", dir="/var/tmp"))
    for name in ("views", "bound", "layer"):
        (root / name).mkdir()
    (root / "views/v").write_bytes(os.urandom(LENGTH))
    (root / "metadata").write_bytes(probe_image(LENGTH))
    yield root
    for name in ("layer", "bound"):
        while mounts.unmount(root / name, detach=True):
            pass
    for path in ("views/v", "metadata"):
        (root / path).unlink(missing_ok=True)
    for name in ("views", "bound", "layer", ""):
        (root / name).rmdir()


def mount(place: Path, *, directio: bool = False) -> Path:
    layer = place / "layer"
    mounts.mount_erofs(place / "metadata", layer, [place / "views/v"], directio=directio)
    return layer / os.fsdecode(FILE_NAME)


def test_a_bind_mount_shows_the_directory_and_is_shared_with_nobody(place: Path) -> None:
    assert not mounts.is_mounted(place / "bound")
    mounts.bind_private(place / "views", place / "bound")
    assert mounts.is_mounted(place / "bound") and not mounts.is_mounted(place)
    assert (place / "bound/v").samefile(place / "views/v")
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    escaped = str(place / "bound").replace(" ", "\\040")
    line = next(line for line in lines.splitlines() if f" {escaped} " in line)
    assert "shared:" not in line and "master:" not in line


def test_a_mount_is_found_through_a_linked_parent(place: Path) -> None:
    mounts.bind_private(place / "views", place / "bound")
    link = place.parent / f"{place.name} link"
    link.symlink_to(place)
    try:
        found = mounts.mount_at(link / "bound")
    finally:
        link.unlink()
    assert found is not None and found.target == place / "bound"


def test_an_image_shows_the_bytes_of_its_device_with_and_without_directio(place: Path) -> None:
    for directio in (False, True):
        file = mount(place, directio=directio)
        assert file.read_bytes() == (place / "views/v").read_bytes()
        found = mounts.mount_at(file.parent)
        assert found is not None and found.kind == "erofs" and "ro" in found.options
        assert ("directio" in found.super_options) is directio
        assert mounts.unmount(file.parent)
        assert not mounts.unmount(file.parent)


def test_unmounting_what_is_not_there_says_so(place: Path) -> None:
    assert not mounts.unmount(place / "bound")
    assert not mounts.unmount(place / "missing", detach=True)


def test_a_busy_mount_can_only_be_detached(place: Path) -> None:
    file = mount(place)
    with open(file, "rb"):
        with pytest.raises(OSError) as caught:
            mounts.unmount(file.parent)
        assert caught.value.errno == errno.EBUSY and str(file.parent) in str(caught.value)
        assert mounts.unmount(file.parent, detach=True)


def test_what_cannot_be_mounted_names_its_target(place: Path) -> None:
    layer, view = place / "layer", place / "views/v"
    with pytest.raises(OSError) as caught:
        mounts.mount_erofs(view, layer, [view])
    assert caught.value.errno == errno.EINVAL and str(layer) in str(caught.value)
    with pytest.raises(OSError, match="comma"):
        mounts.mount_erofs(place / "metadata", layer, [Path("/a,b")])
    with pytest.raises(OSError) as caught:
        mounts.mount_erofs(place / "metadata", layer, [Path("/" + "d/" * 3000)])
    assert caught.value.errno == errno.ENAMETOOLONG
    with pytest.raises(FileNotFoundError):
        mounts.bind_private(place / "missing", place / "bound")
    assert not mounts.is_mounted(layer) and not mounts.is_mounted(place / "bound")


def test_a_view_is_open_as_long_as_any_instance_or_descriptor_has_it(place: Path) -> None:
    view = place / "views/v"
    assert not mounts.view_is_open(view)
    with open(view, "rb"):
        assert mounts.view_is_open(view)
    file = mount(place)
    assert mounts.view_is_open(view)
    with open(file, "rb"):
        mounts.unmount(file.parent, detach=True)
        assert mounts.view_is_open(view)
    assert not mounts.view_is_open(view)


def test_asking_for_a_view_never_signals_the_daemon(place: Path) -> None:
    """Whoever opens the file while the lease is held makes the kernel signal its holder."""
    hits: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, _: hits.append(number))
    child = os.fork()
    if child == 0:
        for _ in range(3000):
            os.close(os.open(place / "views/v", os.O_RDONLY))
        os._exit(0)
    try:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            mounts.view_is_open(place / "views/v")
    finally:
        signal.signal(signal.SIGIO, before)
    assert hits == []
    with pytest.raises(OSError):
        mounts.view_is_open(place / "views")
    with pytest.raises(FileNotFoundError):
        mounts.view_is_open(place / "missing")


def test_a_mount_is_told_from_the_next_one_at_its_place(place: Path) -> None:
    bound = place / "bound"
    assert mounts.unique_id(bound) is None
    assert mounts.unique_id(place / "none") is None
    mounts.bind_private(place / "views", bound)
    first = mounts.unique_id(bound)
    assert first and mounts.unique_id(bound) == first
    mounts.unmount(bound)
    mounts.bind_private(place / "views", bound)
    assert mounts.unique_id(bound) not in (None, first)
