"""What must hold of snapshots on a disk that is full, mounted into, or owned by others (root)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.process import run
from snapshotter.errors import FailedPreconditionError, NoSpaceError, NotFoundError
from snapshotter.snapshots.database import LOG_BYTES, Database
from snapshotter.snapshots.database_room import RESERVE_BYTES
from snapshotter.snapshots.lazy import PlainOnly
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from snapshotter.snapshots.trash import Trash
from tests.fakes.lazy import FakeLazyLayers, digest

pytestmark = pytest.mark.root
REF = "containerd.io/snapshot.ref"
CONFIG = SnapshotterConfig(overlay_options=())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, a little bigger than what the database takes."""
    place = tmp_path / "disk"
    place.mkdir()
    size_bytes = RESERVE_BYTES + 5 * LOG_BYTES
    run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", place])
    yield place
    run(["umount", "-l", place])


def fill(place: Path) -> None:
    with (place / "filler").open("ab", buffering=0) as file:
        for piece in (1 << 20, 1 << 12, 1 << 10):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError:
                continue


async def test_snapshots_can_be_removed_though_the_disk_is_full(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = await Database.open(small_disk / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(database, small_disk, PlainOnly(), CONFIG)
    await snapshotter.start()
    made = 0
    for number in range(20):
        await snapshotter.prepare(f"key {number}", "", {"l": "v" * 4000})
    await database.write(lambda c: c.execute("CREATE TABLE filler (v TEXT)"))
    fill(small_disk)
    with pytest.raises(NoSpaceError, match=r"ember\.db"):
        while made < 5000:
            await database.write(
                lambda c: c.execute("INSERT INTO filler VALUES (?)", ("v" * 4000,))
            )
            made += 1
    for number in range(20):
        await snapshotter.remove(f"key {number}")
    assert "giving up the reserve" in caplog.text
    with pytest.raises(NotFoundError):
        await snapshotter.stat("key 0")
    (small_disk / "filler").unlink()
    await snapshotter.prepare("key 0", "", {})
    await snapshotter.close()
    await database.close()
    again = await Database.open(small_disk / "ember.db", [SCHEMA])
    assert (small_disk / "ember.db.reserve").stat().st_size == RESERVE_BYTES
    await again.close()


OPENER = """
import asyncio, sys
from pathlib import Path
from snapshotter.errors import NoSpaceError
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.records import last_id

async def main():
    try:
        database = await Database.open(Path(sys.argv[1]), [SCHEMA])
        assert await database.read(last_id) == 0
        await database.close()
        print("opened")
    except NoSpaceError as error:
        print("no space:", error)

asyncio.run(main())
"""


def opened(path: Path) -> str:
    """What a process says that opens the database: the kernel may kill it."""
    ended = subprocess.run(
        [sys.executable, "-c", OPENER, str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout


@pytest.fixture
def small_blocks(tmp_path: Path) -> Iterator[Path]:
    """A file system whose blocks are smaller than a page, so that a page may be half a hole."""
    image, place = tmp_path / "image", tmp_path / "blocks"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(12 * 2**20)
    run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "1024", image])
    run(["mount", "-t", "ext4", "-o", "loop,commit=1", image, place])
    yield place
    run(["umount", "-l", place])


@pytest.mark.parametrize("free_bytes", [0, 10_000, 30_000, 90_000, 270_000])
def test_a_nearly_full_disk_of_small_blocks_kills_no_process(
    small_blocks: Path, free_bytes: int
) -> None:
    path, filler = small_blocks / "ember.db", small_blocks / "filler"
    assert opened(path) == "opened\n"
    fill(small_blocks)
    os.truncate(filler, filler.stat().st_size - free_bytes)
    os.sync()
    assert opened(path) == "opened\n"
    (small_blocks / "ember.db.reserve").unlink(missing_ok=True)
    fill(small_blocks)
    os.truncate(filler, filler.stat().st_size - free_bytes)
    os.sync()
    said = opened(path)
    assert said == "opened\n" or "free some space there" in said


async def test_a_removed_snapshot_with_a_mount_inside_keeps_what_is_mounted(
    tmp_path: Path,
) -> None:
    database = await Database.open(tmp_path / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(database, tmp_path, PlainOnly(), CONFIG)
    await snapshotter.start()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (mount,) = await snapshotter.prepare("key", "", {})
    inner = Path(mount.source) / "volume with spaces"
    inner.mkdir()
    run(["mount", "--bind", outside, inner])
    try:
        await snapshotter.remove("key")
        await snapshotter.close()
        assert (outside / "file").read_text() == "kept"
        (left,) = (tmp_path / "trash").iterdir()
    finally:
        mounted = [
            line.split(" ")[4].replace("\\040", " ")
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(tmp_path) in line.split(" ")[4]
        ]
        for point in mounted:
            run(["umount", point])
    assert Trash(tmp_path / "trash").empty() == 0
    assert not left.exists()
    assert (outside / "file").read_text() == "kept"
    await database.close()


def test_immutable_files_stay_until_they_can_be_deleted(tmp_path: Path) -> None:
    tree = tmp_path / "trash" / "1-a" / "fs"
    tree.mkdir(parents=True)
    (tree / "immutable").write_text("x")
    (tree / "ordinary").write_text("x")
    subprocess.run(["chattr", "+i", tree / "immutable"], check=True)
    try:
        assert Trash(tmp_path / "trash").empty() == 1
        assert [path.name for path in tree.iterdir()] == ["immutable"]
    finally:
        subprocess.run(["chattr", "-i", tree / "immutable"], check=True)
    assert Trash(tmp_path / "trash").empty() == 0


async def test_a_new_root_has_its_parents_owner_also_when_that_is_readable_only_later(
    tmp_path: Path,
) -> None:
    database = await Database.open(tmp_path / "ember.db", [SCHEMA])
    lazy = FakeLazyLayers()
    snapshotter = Snapshotter(database, tmp_path, lazy, CONFIG)
    await snapshotter.start()
    (mount,) = await snapshotter.prepare("key", "", {})
    os.chown(mount.source, 1000, 1001)
    await snapshotter.commit("base", "key", {})
    await snapshotter.prepare("child", "base", {})
    root = (tmp_path / "snapshots/2/fs").stat()
    assert (root.st_uid, root.st_gid, root.st_mode & 0o7777) == (1000, 1001, 0o755)

    chain = str(digest("chain"))
    lazy.taken, lazy.ready = {chain}, False
    with pytest.raises(Exception, match="being provided"):
        await snapshotter.prepare("extract", "base", {REF: chain})
    await snapshotter.prepare("late", chain, {})
    upper = tmp_path / "snapshots/4/fs"
    assert upper.stat().st_uid == 0
    lazy.ready = True
    (tmp_path / "snapshots/3/mounted").mkdir()
    (tmp_path / "snapshots/3/fs").symlink_to(tmp_path / "snapshots/3/mounted")
    os.chown(tmp_path / "snapshots/3/mounted", 7, 8)
    await snapshotter.mounts("late")
    assert (upper.stat().st_uid, upper.stat().st_gid) == (7, 8)
    os.chown(upper, 9, 9)
    await snapshotter.mounts("late")
    assert upper.stat().st_uid == 9, "what a container chose is not undone"
    await snapshotter.close()
    await database.close()


async def test_what_is_standing_cannot_be_removed_on_any_disk(small_disk: Path) -> None:
    database = await Database.open(small_disk / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(database, small_disk, PlainOnly(), CONFIG)
    await snapshotter.start()
    await snapshotter.prepare("key", "", {})
    await snapshotter.commit("base", "key", {})
    await snapshotter.prepare("child", "base", {})
    fill(small_disk)
    with pytest.raises(FailedPreconditionError):
        await snapshotter.remove("base")
    assert (await snapshotter.stat("base")).name == "base"
    await snapshotter.close()
    await database.close()
