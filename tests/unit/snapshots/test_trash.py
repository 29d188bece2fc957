"""What must hold of deletion and measuring: trees written by strangers, of any depth and shape."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.snapshots.trash import Trash
from snapshotter.snapshots.usage import measure

DEEP = 1500


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Besides those that are taken by what ran in this process before.
    taken = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def deep_tree(top: Path, name: str = "directory") -> None:
    """A chain of ``DEEP`` directories, much longer than PATH_MAX, with a file in the last."""
    top.mkdir(parents=True)
    fd = os.open(top, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


def test_a_tree_deeper_than_path_max_goes_and_is_measured(
    tmp_path: Path, few_descriptors: None
) -> None:
    trash = tmp_path / "trash"
    deep_tree(trash / "1-a" / "fs")
    try:
        assert measure(trash / "1-a").inodes == DEEP + 3
        assert Trash(trash).empty() == 0
        assert list(trash.iterdir()) == []
    finally:  # what is left would be too deep for Python's own rmtree
        subprocess.run(["rm", "-rf", str(trash)], check=True)


def test_links_are_deleted_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    tree = tmp_path / "trash" / "1-a"
    (tree / "fs").mkdir(parents=True)
    (tree / "fs" / "to-directory").symlink_to(outside)
    (tree / "fs" / "to-file").symlink_to(outside / "file")
    (tree / "fs" / "dangling").symlink_to("nowhere")
    os.mkfifo(tree / "fs" / "fifo")
    os.link(outside / "file", tree / "fs" / "hard")
    (tmp_path / "trash" / "2-a").symlink_to(outside)
    (tmp_path / "trash" / "3-a").write_text("a file")
    assert Trash(tmp_path / "trash").empty() == 0
    assert list((tmp_path / "trash").iterdir()) == []
    assert (outside / "file").read_text() == "kept"


def test_names_that_are_not_utf8_and_closed_directories_go(tmp_path: Path) -> None:
    fs = tmp_path / "trash" / "1-a" / "fs"
    fs.mkdir(parents=True)
    (fs / os.fsdecode(b"\xff\xfe\n")).mkdir()
    (fs / "closed").mkdir(mode=0)
    assert measure(fs).inodes == 3
    assert Trash(tmp_path / "trash").empty() == 0
    assert list((tmp_path / "trash").iterdir()) == []


def test_a_tree_with_a_mount_inside_stays_whole_and_the_others_go(tmp_path: Path) -> None:
    trash = tmp_path / "trash"
    for name in ("1-a", "2-a"):
        (trash / name / "fs" / "mnt").mkdir(parents=True)
    mounted = trash / "1-a" / "fs" / "mnt"
    assert Trash(trash, mounted=lambda: [Path("/"), mounted]).empty() == 1
    assert mounted.exists()
    assert not (trash / "2-a").exists()
    assert Trash(trash, mounted=lambda: [Path("/")]).empty() == 0
    assert not mounted.exists()


def test_a_stopped_trash_is_emptied_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "trash" / "1-a" / "fs").mkdir(parents=True)
    stopped = Trash(tmp_path / "trash")
    stopped.stop()
    stopped.empty()
    assert (tmp_path / "trash" / "1-a").exists()
    assert Trash(tmp_path / "trash").empty() == 0
    assert not (tmp_path / "trash" / "1-a").exists()


def test_hard_links_and_holes_are_measured_as_what_they_take(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 8192)
    os.link(tmp_path / "data", tmp_path / "again")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    usage = measure(tmp_path)
    assert usage.inodes == 3
    assert 8192 <= usage.size_bytes < 1 << 20


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        Trash(tmp_path / "missing").empty()
