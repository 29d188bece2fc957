"""What must hold of the ten verbs for plain layers: the rules that containerd relies on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from snapshotter.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from snapshotter.snapshots.model import Info, Kind, Mount
from snapshotter.snapshots.snapshotter import Snapshotter


async def layer(snapshotter: Snapshotter, name: str, parent: str = "") -> None:
    await snapshotter.prepare(f"{name}-key", parent, {})
    await snapshotter.commit(name, f"{name}-key", {})


async def names(snapshotter: Snapshotter, *filters: str) -> list[str]:
    return sorted([info.name async for block in snapshotter.walk(filters) for info in block])


async def test_an_empty_snapshot_is_a_writable_bind_mount_of_a_0755_directory(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    before = os.umask(0o077)
    try:
        mounts = await snapshotter.prepare("key", "", {})
    finally:
        os.umask(before)
    assert mounts == (Mount("bind", str(tmp_path / "snapshots/1/fs"), ("rw", "rbind")),)
    assert (tmp_path / "snapshots/1/fs").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "snapshots/1/work").stat().st_mode & 0o7777 == 0o711
    assert await snapshotter.mounts("key") == mounts


async def test_a_snapshot_on_layers_is_an_overlay_with_the_top_layer_first(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    await layer(snapshotter, "base")
    await layer(snapshotter, "top", "base")
    base = tmp_path / "snapshots"
    assert await snapshotter.prepare("key", "top", {}) == (
        Mount(
            "overlay",
            "overlay",
            (
                f"workdir={base}/3/work",
                f"upperdir={base}/3/fs",
                f"lowerdir={base}/2/fs:{base}/1/fs",
                "index=off",
            ),
        ),
    )


async def test_views_are_read_only_whatever_they_stand_on(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    base = tmp_path / "snapshots"
    await layer(snapshotter, "base")
    await layer(snapshotter, "top", "base")
    assert await snapshotter.view("v1", "base", {}) == (
        Mount("bind", f"{base}/1/fs", ("ro", "rbind")),
    )
    assert await snapshotter.view("v2", "top", {}) == (
        Mount("overlay", "overlay", (f"lowerdir={base}/2/fs:{base}/1/fs", "index=off")),
    )
    assert await snapshotter.view("v0", "", {}) == (Mount("bind", f"{base}/5/fs", ("ro", "rbind")),)
    assert not (base / "5/work").exists()


async def test_stat_says_kind_parent_labels_and_equal_times(snapshotter: Snapshotter) -> None:
    await layer(snapshotter, "base")
    before = time.time_ns()
    await snapshotter.prepare("key", "base", {"l": "1", "empty": ""})
    after = time.time_ns()
    info = await snapshotter.stat("key")
    assert info == Info("key", "base", Kind.ACTIVE, info.created_ns, info.created_ns, {"l": "1"})
    assert before <= info.created_ns <= after


async def test_commit_renames_resets_times_and_replaces_labels(snapshotter: Snapshotter) -> None:
    await snapshotter.prepare("key", "", {"old": "1"})
    prepared = await snapshotter.stat("key")
    await snapshotter.commit("name", "key", {"new": "2"})
    info = await snapshotter.stat("name")
    assert info.kind is Kind.COMMITTED
    assert info.labels == {"new": "2"}
    assert info.created_ns == info.updated_ns > prepared.created_ns
    with pytest.raises(NotFoundError):
        await snapshotter.stat("key")


async def test_prepare_and_view_check_the_parent_before_the_key(snapshotter: Snapshotter) -> None:
    await snapshotter.prepare("active", "", {})
    for make in (snapshotter.prepare, snapshotter.view):
        with pytest.raises(NotFoundError):
            await make("active", "missing", {})
        with pytest.raises(InvalidArgumentError):
            await make("active", "active", {})
        with pytest.raises(AlreadyExistsError):
            await make("active", "", {})
        with pytest.raises(InvalidArgumentError):
            await make("", "", {})
        with pytest.raises(InvalidArgumentError):
            await make("k" * 40_000, "", {})
    assert await names(snapshotter) == ["active"]


async def test_commit_refuses_what_containerd_refuses_and_keeps_the_key(
    snapshotter: Snapshotter,
) -> None:
    await layer(snapshotter, "base")
    await layer(snapshotter, "other")
    await snapshotter.view("view", "base", {})
    await snapshotter.prepare("key", "base", {"l": "1"})
    await snapshotter.prepare("free", "", {})
    with pytest.raises(AlreadyExistsError):
        await snapshotter.commit("base", "missing", {})
    with pytest.raises(NotFoundError):
        await snapshotter.commit("name", "missing", {})
    for key in ("view", "other"):
        with pytest.raises(FailedPreconditionError):
            await snapshotter.commit("name", key, {})
    with pytest.raises(InvalidArgumentError):
        await snapshotter.commit("name", "key", {}, parent="other")
    with pytest.raises(NotFoundError):
        await snapshotter.commit("name", "free", {}, parent="missing")
    with pytest.raises(FailedPreconditionError):
        await snapshotter.commit("name", "free", {}, parent="key")
    with pytest.raises(InvalidArgumentError):
        await snapshotter.commit("", "key", {})
    info = await snapshotter.stat("key")
    assert (info.kind, info.parent, info.labels) == (Kind.ACTIVE, "base", {"l": "1"})


async def test_commit_may_give_a_parent_to_a_snapshot_without(snapshotter: Snapshotter) -> None:
    await layer(snapshotter, "base")
    await snapshotter.prepare("key", "", {})
    await snapshotter.commit("name", "key", {}, parent="base")
    assert (await snapshotter.stat("name")).parent == "base"
    with pytest.raises(FailedPreconditionError):
        await snapshotter.remove("base")
    await snapshotter.prepare("same", "base", {})
    await snapshotter.commit("again", "same", {}, parent="base")
    assert (await snapshotter.stat("again")).parent == "base"


async def test_remove_is_refused_while_something_stands_on_it(snapshotter: Snapshotter) -> None:
    await layer(snapshotter, "base")
    await snapshotter.prepare("key", "base", {})
    with pytest.raises(FailedPreconditionError, match="remove"):
        await snapshotter.remove("base")
    with pytest.raises(NotFoundError):
        await snapshotter.remove("missing")
    await snapshotter.remove("key")
    await snapshotter.remove("base")
    assert await names(snapshotter) == []


async def test_names_and_keys_can_be_used_again(snapshotter: Snapshotter) -> None:
    for _ in range(3):
        await layer(snapshotter, "name")
        await snapshotter.view("key", "name", {})
        await snapshotter.remove("key")
        await snapshotter.prepare("key", "name", {})
        await snapshotter.remove("key")
        await snapshotter.remove("name")
    assert await names(snapshotter) == []


async def test_mounts_are_for_active_snapshots_and_views_only(snapshotter: Snapshotter) -> None:
    await layer(snapshotter, "base")
    with pytest.raises(FailedPreconditionError):
        await snapshotter.mounts("base")
    with pytest.raises(NotFoundError):
        await snapshotter.mounts("missing")


async def test_update_follows_the_field_mask(snapshotter: Snapshotter) -> None:
    await snapshotter.prepare("key", "", {"a": "1", "b": "2", "c": "3"})
    created = await snapshotter.stat("key")
    info = await snapshotter.update("key", {"a": "x", "d": "4"}, ["labels.a", "labels.b"])
    assert info.labels == {"a": "x", "c": "3"}
    assert info.updated_ns > info.created_ns == created.created_ns
    assert (await snapshotter.update("key", {"d": "4"}, ["labels"])).labels == {"d": "4"}
    assert (await snapshotter.update("key", {"e": "5", "f": ""}, [])).labels == {"e": "5"}
    info = await snapshotter.update("key", {"a.b/c": "6"}, ["labels.a.b/c"])
    assert info.labels == {"e": "5", "a.b/c": "6"} == dict((await snapshotter.stat("key")).labels)
    for path in ("parent", "kind", "name", "labels.", "labelsx", ""):
        with pytest.raises(InvalidArgumentError):
            await snapshotter.update("key", {}, [path])
    with pytest.raises(NotFoundError):
        await snapshotter.update("missing", {}, [])


async def test_a_label_has_at_most_4096_bytes(snapshotter: Snapshotter) -> None:
    fits, too_long = {"k": "v" * 4095}, {"k": "ü" * 2048}
    await snapshotter.prepare("key", "", fits)
    assert (await snapshotter.stat("key")).labels == fits
    with pytest.raises(InvalidArgumentError):
        await snapshotter.prepare("other", "", too_long)
    with pytest.raises(InvalidArgumentError):
        await snapshotter.commit("name", "key", too_long)
    with pytest.raises(InvalidArgumentError):
        await snapshotter.update("key", too_long, [])
    with pytest.raises(InvalidArgumentError):
        await snapshotter.view("other", "", {"": "v"})


async def test_list_filters_and_sends_blocks(snapshotter: Snapshotter) -> None:
    await layer(snapshotter, "p")
    for number in range(5):
        await snapshotter.prepare(f"a{number}", "p", {"l": str(number % 2)})
    await snapshotter.view("v", "p", {})
    assert await names(snapshotter, "kind==view", "name==p") == ["p", "v"]
    assert await names(snapshotter, "parent==p,labels.l==1") == ["a1", "a3"]
    assert await names(snapshotter, "parent==p") == ["a0", "a1", "a2", "a3", "a4", "v"]
    assert await names(snapshotter, 'parent==""') == ["p"]
    assert await names(snapshotter, "name==nobody") == []
    assert await names(snapshotter, "name~=^a", "labels.l==0") == ["a0", "a1", "a2", "a3", "a4"]
    blocks = [len(block) async for block in snapshotter.walk([], 3)]
    assert blocks == [3, 3, 1]
    with pytest.raises(InvalidArgumentError):
        await names(snapshotter, "name=")


async def test_stat_and_changes_work_while_a_list_is_read(snapshotter: Snapshotter) -> None:
    for number in range(10):
        await snapshotter.prepare(f"k{number}", "", {})
    seen = []
    async for block in snapshotter.walk([], 1):
        info = block[0]
        assert await snapshotter.stat(info.name) == info
        await snapshotter.remove(info.name)
        seen.append(info.name)
    assert len(seen) == 10


async def test_usage_counts_the_snapshot_alone(snapshotter: Snapshotter, tmp_path: Path) -> None:
    await snapshotter.prepare("key", "", {})
    base = tmp_path / "snapshots/1/fs"
    (base / "file").write_bytes(b"x" * 10_000)
    os.link(base / "file", base / "again")
    (base / "link").symlink_to("/")
    active = await snapshotter.usage("key")
    assert active.inodes == 3
    assert active.size_bytes >= 12_288
    await snapshotter.commit("name", "key", {})
    assert await snapshotter.usage("name") == active
    await snapshotter.view("view", "name", {})
    assert (await snapshotter.usage("view")).inodes == 0
    await snapshotter.prepare("child", "name", {})
    assert (await snapshotter.usage("child")).inodes == 1
    with pytest.raises(NotFoundError):
        await snapshotter.usage("missing")


async def test_a_parent_that_is_being_removed_is_not_found(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    await layer(snapshotter, "base")
    (tmp_path / "snapshots/1").rename(tmp_path / "on its way to the trash")
    gone, made = await asyncio.gather(
        snapshotter.remove("base"), snapshotter.prepare("key", "base", {}), return_exceptions=True
    )
    assert gone is None
    assert isinstance(made, NotFoundError)
    assert await names(snapshotter) == []


@pytest.mark.root
async def test_a_parent_whose_directory_is_away_for_a_while_gives_its_owner_later(
    snapshotter: Snapshotter, tmp_path: Path
) -> None:
    await layer(snapshotter, "base")
    base, away = tmp_path / "snapshots/1", tmp_path / "away"
    os.chown(base / "fs", 12, 34)
    base.rename(away)
    await snapshotter.prepare("key", "base", {})
    with pytest.raises(UnavailableError, match="snapshots/1/fs, is not there just now"):
        await snapshotter.mounts("key")
    away.rename(base)
    await snapshotter.mounts("key")
    status = (tmp_path / "snapshots/2/fs").stat()
    assert (status.st_uid, status.st_gid) == (12, 34)
