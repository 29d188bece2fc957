"""A disk that is full while indexes are built or written: an error, and nothing half."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.errors import NoSpaceError
from snapshotter.indexes.build import Builder
from snapshotter.indexes.cache import IndexCache
from snapshotter.indexes.fetched import fetch_into
from snapshotter.indexes.find import find
from snapshotter.indexes.publish import LayoutTarget, Subject, publish
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.indexes.scenes import RING, scene

pytestmark = pytest.mark.root


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few kilobytes."""
    mount = tmp_path / "full"
    mount.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(mount)], check=True
    )
    (mount / "others").write_bytes(bytes(44 * 1024))
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def _left(directory: Path) -> list[str]:
    names = {path.name for path in directory.rglob("*") if path.is_file()}
    return sorted(names - {"others", "lock"})


async def test_a_build_into_a_full_cache_fails_and_leaves_nothing(
    tmp_path: Path, full: Path
) -> None:
    async with scene(tmp_path, key=None) as bed:
        cache = IndexCache(full, SkippingClock())
        builder = Builder(bed.client, cache, lambda step: None, parallel=1)
        try:
            with pytest.raises(NoSpaceError, match="no space for"):
                await builder.build(bed.image)
        finally:
            builder.close()
        assert [name for name in _left(full) if ".tmp-" in name] == []
        assert not any(bed.image.layers[0].digest.hex in name for name in _left(full))


async def test_fetching_to_a_full_disk_fails_and_leaves_nothing(tmp_path: Path, full: Path) -> None:
    async with scene(tmp_path) as bed:
        found = (await find(bed.client, bed.pinned, RING)).signed
        assert found is not None
        layer = bed.image.layers[0]
        with pytest.raises(NoSpaceError, match="no space for"):
            await fetch_into(bed.client, found, layer, full)
        assert _left(full) == []


async def test_an_artifact_on_a_full_disk_is_not_listed(tmp_path: Path, full: Path) -> None:
    async with scene(tmp_path) as bed:
        cache = IndexCache(tmp_path / "cache", SkippingClock())
        builder = Builder(bed.client, cache, lambda step: None, parallel=1)
        built = await builder.build(bed.image)
        builder.close()
        target = LayoutTarget(full)
        with pytest.raises(NoSpaceError, match="no space for"):
            await publish(Subject.of(bed.image), [one.local for one in built], [], target)
        assert "index.json" not in _left(full)
        assert [name for name in _left(full) if ".tmp-" in name] == []
