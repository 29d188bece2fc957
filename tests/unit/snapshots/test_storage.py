"""What must hold of directories and rows together: repair at start, clean-up beside work."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from snapshotter.errors import ConfigError, FailedPreconditionError, NoSpaceError
from snapshotter.snapshots.database import Database, Work
from snapshotter.snapshots.directories import Directories
from snapshotter.snapshots.lazy import PlainOnly
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.model import Kind
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig

T = TypeVar("T")
REF = "containerd.io/snapshot.ref"
CONFIG = SnapshotterConfig(overlay_options=())


async def start(database: Database, root: Path) -> Snapshotter:
    snapshotter = Snapshotter(database, root, PlainOnly(), CONFIG)
    await snapshotter.start()
    return snapshotter


async def test_directories_without_a_row_go_at_start_and_others_stay(
    database: Database, tmp_path: Path
) -> None:
    for name in ("4/fs", "7", "lost+found", "notes.txt"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    (tmp_path / "trash" / "3-a" / "fs").mkdir(parents=True)
    snapshotter = await start(database, tmp_path)
    (mount,) = await snapshotter.prepare("key", "", {})
    assert mount.source == str(tmp_path / "snapshots/8/fs")
    await snapshotter.close()
    left = {path.name for path in (tmp_path / "snapshots").iterdir()}
    assert left == {"8", "lost+found", "notes.txt"}


async def test_an_id_is_never_used_again(database: Database, tmp_path: Path) -> None:
    first = await start(database, tmp_path)
    await first.prepare("key", "", {})
    await first.remove("key")
    await first.close()
    second = await start(database, tmp_path)
    (mount,) = await second.prepare("key", "", {})
    assert mount.source.endswith("/snapshots/2/fs")
    await second.close()


async def test_empty_directories_that_a_power_loss_took_are_made_again(
    database: Database, tmp_path: Path
) -> None:
    first = await start(database, tmp_path)
    await first.prepare("active", "", {})
    await first.view("view", "", {})
    await first.prepare("key", "", {})
    await first.commit("lost", "key", {REF: "sha256:lost"})
    await first.close()
    shutil.rmtree(tmp_path / "snapshots")
    second = await start(database, tmp_path)
    assert (tmp_path / "snapshots/1/fs").is_dir()
    assert (tmp_path / "snapshots/1/work").is_dir()
    assert (tmp_path / "snapshots/2/fs").is_dir()
    assert not (tmp_path / "snapshots/3").exists()
    assert second.damaged == ("lost",)
    await second.prepare("extract", "", {REF: "sha256:lost"})
    assert (await second.stat("extract")).kind is Kind.ACTIVE
    await second.remove("lost")
    await second.close()


async def test_cleanup_beside_prepares_takes_nothing_that_is_in_use(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    keys = [f"key {number}" for number in range(60)]

    async def clean() -> None:
        for _ in range(20):
            await snapshotter.cleanup()

    await asyncio.gather(clean(), *(snapshotter.prepare(key, "", {}) for key in keys), clean())
    for key in keys:
        (mount,) = await snapshotter.mounts(key)
        assert Path(mount.source).is_dir()
    assert len(list((tmp_path / "snapshots").iterdir())) == len(keys)


async def test_a_prepare_whose_client_hangs_up_is_whole_or_absent(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    for turns in range(12):
        task = asyncio.create_task(snapshotter.prepare(f"key {turns}", "", {}))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await snapshotter.close()
    there = [info.name async for block in snapshotter.walk([]) for info in block]
    assert len(list((tmp_path / "snapshots").iterdir())) == len(there)


async def test_a_prepare_that_fails_leaves_no_directory(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    outcomes = await asyncio.gather(
        *(snapshotter.prepare("same", "", {}) for _ in range(8)), return_exceptions=True
    )
    assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 1
    assert len(list((tmp_path / "snapshots").iterdir())) == 1


async def test_usage_is_stored_some_time_after_the_commit(
    database: Database, tmp_path: Path
) -> None:
    config = SnapshotterConfig(overlay_options=(), measure_delay_s=0.0)
    snapshotter = Snapshotter(database, tmp_path, PlainOnly(), config)
    await snapshotter.start()
    for number in range(3):
        await snapshotter.prepare("key", "", {})
        await snapshotter.commit(f"name {number}", "key", {})
    for _ in range(100_000):
        if not await database.read(unmeasured):
            break
    shutil.rmtree(tmp_path / "snapshots/1")
    assert (await snapshotter.usage("name 0")).inodes == 1
    await snapshotter.close()


def unmeasured(connection: sqlite3.Connection) -> bool:
    query = "SELECT 1 FROM snapshots WHERE size_bytes IS NULL LIMIT 1"
    return connection.execute(query).fetchone() is not None


class FullDatabase(Database):
    """A disk that is full for writes that do not free space, or for all."""

    full = True

    async def write(
        self,
        work: Work[T],
        *,
        frees_space: bool = False,
        first: Callable[[], object] | None = None,
    ) -> T:
        if self.full:
            raise NoSpaceError("no room on the file system")
        return await super().write(work, frees_space=frees_space, first=first)


async def test_remove_on_a_full_disk_does_not_end_containerds_collection(tmp_path: Path) -> None:
    database = await FullDatabase.open(tmp_path / "ember.db", [SCHEMA])
    assert isinstance(database, FullDatabase)
    snapshotter = await start(database, tmp_path)
    database.full = False
    await snapshotter.prepare("key", "", {})
    database.full = True
    with pytest.raises(FailedPreconditionError, match="no room"):
        await snapshotter.remove("key")
    with pytest.raises(NoSpaceError):
        await snapshotter.prepare("other", "", {})
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    await snapshotter.close()
    await database.close()


async def test_a_root_that_overlayfs_cannot_name_is_refused(database: Database) -> None:
    for root in ("relative", "/var/lib/a:b", "/var/lib/a,b", "/var/lib/a\\b"):
        with pytest.raises(ConfigError, match="overlayfs"):
            Snapshotter(database, Path(root), PlainOnly(), CONFIG)


def test_what_is_being_made_is_never_unclaimed(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    directories.start(last_id=5)
    made, abandoned = directories.reserve(), directories.reserve()
    assert (made, abandoned) == (6, 7)
    for snapshot_id in (made, abandoned):
        directories.make(snapshot_id, Kind.ACTIVE)
    before = directories.unclaimed()
    directories.settled(made)
    directories.settled(abandoned)
    assert before == [], "settled after the look: its row is not in doubt"
    assert sorted(directories.unclaimed()) == [made, abandoned]
    directories.discard(abandoned)
    directories.discard(abandoned)
    assert directories.present() == [made]
