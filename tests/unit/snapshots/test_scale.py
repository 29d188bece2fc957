"""What must hold with ten thousand snapshots: no verb but a whole List reads every row."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from snapshotter.snapshots import labels as known
from snapshotter.snapshots import metastore
from snapshotter.snapshots.database import Database, Work
from snapshotter.snapshots.lazy import PlainOnly
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.model import Kind
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig

T = TypeVar("T")
MANY = 10_000
CHAIN_LENGTH = 20
LABELS = {known.SNAPSHOT_REF: "sha256:layer", known.IMAGE_REF: "registry.example/app:1"}


class WatchedDatabase(Database):
    """Runs every statement's query plan as well and keeps those that walk a whole table."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.statements = 0
        self.scans: list[str] = []

    async def write(
        self,
        work: Work[T],
        *,
        frees_space: bool = False,
        first: Callable[[], object] | None = None,
    ) -> T:
        return await super().write(
            lambda c: self._watch(c, work), frees_space=frees_space, first=first
        )

    def look(self, work: Work[T]) -> T:
        return super().look(lambda c: self._watch(c, work))

    async def read(self, work: Work[T]) -> T:
        return await super().read(lambda c: self._watch(c, work))

    def _watch(self, connection: sqlite3.Connection, work: Work[T]) -> T:
        seen: list[str] = []
        connection.set_trace_callback(seen.append)
        try:
            result = work(connection)
        finally:
            connection.set_trace_callback(None)
        for statement in seen:
            if not statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")):
                continue
            self.statements += 1
            plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            self.scans += [
                f"{row[3]}: {statement}"
                for row in plan
                if row[3].startswith("SCAN s") and "schema" not in row[3]
            ]
        return result


def fill(connection: sqlite3.Connection) -> None:
    """Images of ``CHAIN_LENGTH`` committed layers each."""
    for number in range(1, MANY + 1):
        parent = "" if number % CHAIN_LENGTH == 1 else f"name {number - 1}"
        labels = {**LABELS, known.SNAPSHOT_REF: f"sha256:{number}"}
        metastore.create(connection, number, Kind.ACTIVE, f"key {number}", parent, labels, number)
        metastore.commit(connection, f"name {number}", f"key {number}", "", labels, number)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "ember.db"
    connection = sqlite3.connect(path)
    for script in SCHEMA.migrations:
        connection.executescript(script)
    connection.executescript(
        "CREATE TABLE schema_versions (piece TEXT PRIMARY KEY, version INTEGER NOT NULL);"
        f"INSERT INTO schema_versions VALUES ('{SCHEMA.name}', {len(SCHEMA.migrations)})"
    )
    fill(connection)
    connection.commit()
    connection.close()
    return path


async def test_no_verb_reads_every_row_and_chains_cost_what_they_are_long(
    filled: Path, tmp_path: Path
) -> None:
    (tmp_path / "ember.db").write_bytes(filled.read_bytes())
    for number in range(1, MANY + 1):
        (tmp_path / "snapshots" / str(number)).mkdir(parents=True)
    (tmp_path / f"snapshots/{MANY}/fs").mkdir()
    database = await WatchedDatabase.open(tmp_path / "ember.db", [SCHEMA])
    assert isinstance(database, WatchedDatabase)
    snapshotter = Snapshotter(
        database, tmp_path, PlainOnly(), SnapshotterConfig(overlay_options=())
    )
    await snapshotter.start()
    assert database.scans  # the start reads every row: the watch sees it
    database.scans.clear()
    top = f"name {MANY}"
    (mount,) = await snapshotter.prepare("key", top, {"l": "1"})
    lower = next(o for o in mount.options if o.startswith("lowerdir="))
    assert len(lower.split(":")) == CHAIN_LENGTH
    layer = {**LABELS, known.SNAPSHOT_REF: "sha256:new"}
    await snapshotter.prepare("extract", top, layer)
    await snapshotter.commit("layer", "extract", layer)
    await snapshotter.view("view", top, {})
    await snapshotter.mounts("view")
    await snapshotter.stat("key")
    await snapshotter.usage("layer")
    await snapshotter.update("layer", {"l": "2"}, ["labels.l"])
    text = f'labels."{known.SNAPSHOT_REF}"==sha256:{MANY - 1},parent=="name {MANY - 2}"'
    found = [info.name async for block in snapshotter.walk([text]) for info in block]
    assert found == [f"name {MANY - 1}"]
    for key in ("view", "key", "layer"):
        await snapshotter.remove(key)
    assert database.statements > 30
    assert database.scans == []
    everything = [info.name async for block in snapshotter.walk([]) for info in block]
    assert len(everything) == len(set(everything)) == MANY
    await snapshotter.close()
    await database.close()


async def test_a_second_list_reads_only_what_changed(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "ember.db").write_bytes(filled.read_bytes())
    database = await Database.open(tmp_path / "ember.db", [SCHEMA])
    snapshotter = Snapshotter(
        database, tmp_path, PlainOnly(), SnapshotterConfig(overlay_options=())
    )
    first = {info.name: info async for block in snapshotter.walk([]) for info in block}
    await snapshotter.update("name 7", {"l": "2"}, ["labels.l"])
    await database.write(lambda c: metastore.forget_layer(c, 8))
    await snapshotter.remove(f"name {MANY}")
    second = {info.name: info async for block in snapshotter.walk([]) for info in block}
    assert set(first) - set(second) == {f"name {MANY}"}
    assert {name for name, info in second.items() if first[name] is not info} == {
        "name 7",
        "name 8",
    }
    assert second["name 7"].labels["l"] == "2"
    assert known.SNAPSHOT_REF not in second["name 8"].labels
    await snapshotter.close()
    await database.close()


async def test_a_clock_set_back_hides_no_change(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "ember.db", [SCHEMA])
    await database.write(lambda c: metastore.create(c, 1, Kind.ACTIVE, "key", "", {}, 1000))
    before = await database.write(lambda c: metastore.update(c, "key", {"l": "1"}, [], 2000))
    after = await database.write(lambda c: metastore.update(c, "key", {"l": "2"}, [], 500))
    assert after.updated_ns > before.updated_ns
    await database.close()
