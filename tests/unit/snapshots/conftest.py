"""A snapshotter on a fresh root, with a clock turned by hand and lazy layers played by a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.snapshots.database import Database
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from tests.fakes.lazy import FakeLazyLayers

CONFIG = SnapshotterConfig(overlay_options=("index=off",))


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "ember.db", [SCHEMA])
    yield opened
    await opened.close()


@pytest.fixture
def lazy() -> FakeLazyLayers:
    return FakeLazyLayers()


@pytest.fixture
async def snapshotter(
    tmp_path: Path, database: Database, lazy: FakeLazyLayers
) -> AsyncIterator[Snapshotter]:
    built = Snapshotter(database, tmp_path, lazy, CONFIG)
    await built.start()
    yield built
    await built.close()
