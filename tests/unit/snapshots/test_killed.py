"""What must hold after kill -9 at any step of a verb: the next start finds it done or undone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from snapshotter.errors import AlreadyExistsError, NotFoundError
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.model import Info, Kind
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from snapshotter.snapshots.trash import Trash
from tests.fakes.lazy import FakeLazyLayers
from tests.unit.snapshots.killed import CHAIN, take

LEAST_STEPS = {"prepare": 12, "commit": 8, "remove": 6, "take": 8, "start": 8}


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[Snapshotter]:
    database = await Database.open(root / "ember.db", [SCHEMA])
    lazy = FakeLazyLayers()
    lazy.taken = {CHAIN}
    snapshotter = Snapshotter(database, root, lazy, SnapshotterConfig(overlay_options=()))
    await snapshotter.start()
    yield snapshotter
    await snapshotter.close()
    await database.close()


async def make_baseline(root: Path) -> None:
    """A committed base, an active snapshot with a file on it, and leftovers without a row."""
    async with opened(root) as snapshotter:
        await snapshotter.prepare("key", "", {})
        await snapshotter.commit("base", "key", {})
        await snapshotter.prepare("active", "base", {"l": "old"})
    (root / "snapshots/2/fs/directory").mkdir()
    (root / "snapshots/2/fs/directory/file").write_text("content")
    (root / "snapshots/9/fs/directory").mkdir(parents=True)
    (root / "trash/3-a/fs").mkdir(parents=True)


async def kill_everywhere(tmp_path: Path, scenario: str) -> list[Path]:
    await make_baseline(tmp_path / "baseline")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.unit.snapshots.killed",
        str(tmp_path / "baseline"),
        str(tmp_path / "killed"),
        scenario,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert int(output) >= LEAST_STEPS[scenario]
    return sorted((tmp_path / "killed").iterdir())


async def find(snapshotter: Snapshotter, name: str) -> Info | None:
    try:
        return await snapshotter.stat(name)
    except NotFoundError:
        return None


async def all_is_whole(snapshotter: Snapshotter, root: Path) -> None:
    """Each row has its directory and each directory its row."""
    await snapshotter.cleanup()
    infos = [info async for block in snapshotter.walk([]) for info in block]
    directories = list((root / "snapshots").iterdir())
    assert len(directories) == len(infos)
    assert snapshotter.damaged == ()
    for info in infos:
        if info.kind is not Kind.COMMITTED:
            (mount,) = await snapshotter.mounts(info.name)
            paths = [o.split("=")[1] for o in mount.options if "dir=" in o] or [mount.source]
            assert all(Path(path).is_dir() for path in paths)


@pytest.mark.parametrize("scenario", sorted(LEAST_STEPS))
async def test_a_kill_at_any_step_leaves_what_the_next_start_repairs(
    tmp_path: Path, scenario: str
) -> None:
    for root in await kill_everywhere(tmp_path, scenario):
        async with opened(root) as snapshotter:
            await all_is_whole(snapshotter, root)
            await CHECKS[scenario](snapshotter, root)
            await all_is_whole(snapshotter, root)
        assert Trash(root / "trash").empty() == 0


async def prepared_or_not(snapshotter: Snapshotter, root: Path) -> None:
    info = await find(snapshotter, "new")
    if info is None:
        await snapshotter.prepare("new", "base", {"l": "1", "m": "2"})
        info = await snapshotter.stat("new")
    else:
        with pytest.raises(AlreadyExistsError):
            await snapshotter.prepare("new", "base", {})
    assert (info.kind, info.parent, info.labels) == (Kind.ACTIVE, "base", {"l": "1", "m": "2"})


async def committed_or_not(snapshotter: Snapshotter, root: Path) -> None:
    active, name = await find(snapshotter, "active"), await find(snapshotter, "name")
    assert (active is None) != (name is None)
    if active is not None:
        assert (active.kind, active.labels) == (Kind.ACTIVE, {"l": "old"})
        await snapshotter.commit("name", "active", {"l": "new"})
    name = await snapshotter.stat("name")
    assert (name.kind, name.parent, name.labels) == (Kind.COMMITTED, "base", {"l": "new"})
    assert (root / "snapshots/2/fs/directory/file").read_text() == "content"
    assert (await snapshotter.usage("name")).inodes == 3


async def removed_or_not(snapshotter: Snapshotter, root: Path) -> None:
    if await find(snapshotter, "active") is not None:
        assert (root / "snapshots/2/fs/directory/file").read_text() == "content"
        await snapshotter.remove("active")
        await snapshotter.cleanup()
    assert not (root / "snapshots/2").exists()
    await snapshotter.remove("base")


async def taken_or_not(snapshotter: Snapshotter, root: Path) -> None:
    await take(snapshotter)
    (stack,) = await snapshotter.lazy_stacks()
    assert [entry.name for entry in stack] == ["base", CHAIN]
    assert await find(snapshotter, "extract") is None


async def started(snapshotter: Snapshotter, root: Path) -> None:
    assert (root / "snapshots/2/fs/directory/file").read_text() == "content"
    assert not (root / "snapshots/9").exists()
    (mount,) = await snapshotter.prepare("next", "", {})
    assert mount.source == str(root / "snapshots/10/fs") or mount.source.endswith("/3/fs")


CHECKS = {
    "prepare": prepared_or_not,
    "commit": committed_or_not,
    "remove": removed_or_not,
    "take": taken_or_not,
    "start": started,
}
