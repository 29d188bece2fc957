"""What must hold of the database: durable when answered, one failure alone, versions, damage."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from functools import partial
from pathlib import Path

import pytest

from snapshotter.errors import (
    CorruptError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from snapshotter.snapshots import database as module
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.schema import SchemaPiece

ONE = SchemaPiece("things", ("CREATE TABLE things (n INTEGER PRIMARY KEY)",))
TWO = SchemaPiece("things", (*ONE.migrations, "ALTER TABLE things ADD COLUMN name TEXT"))


def insert(connection: sqlite3.Connection, number: int) -> int:
    connection.execute("INSERT INTO things (n) VALUES (?)", (number,))
    return number


def count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM things").fetchone()[0])


async def test_what_is_written_is_read_at_once_and_after_opening_again(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    assert await database.write(lambda c: insert(c, 7)) == 7
    assert await database.read(count) == 1
    await database.close()
    await database.close()
    again = await Database.open(tmp_path / "d.db", [ONE])
    assert await again.read(count) == 1
    await again.close()


async def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    await database.write(lambda c: insert(c, 1))
    assert {path.stat().st_mode & 0o77 for path in tmp_path.glob("d.db*")} == {0}
    await database.close()


async def test_one_write_that_fails_undoes_itself_alone(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])

    def spoiled(connection: sqlite3.Connection) -> None:
        insert(connection, 1000)
        raise InvalidArgumentError("no")

    works = [partial(insert, number=n) for n in range(40)]
    outcomes = await asyncio.gather(
        *(database.write(work) for work in works[:20]),
        database.write(spoiled),
        database.write(lambda c: insert(c, 3)),
        *(database.write(work) for work in works[20:]),
        return_exceptions=True,
    )
    assert isinstance(outcomes[20], InvalidArgumentError)
    assert isinstance(outcomes[21], sqlite3.IntegrityError)
    assert await database.read(count) == 40
    await database.close()


async def test_what_comes_first_is_done_once_and_its_failure_writes_nothing(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    done: list[int] = []

    def fails() -> None:
        raise NotADirectoryError("no")

    outcomes = await asyncio.gather(
        database.write(lambda c: insert(c, 1), first=lambda: done.append(1)),
        database.write(lambda c: insert(c, 2), first=fails),
        database.write(lambda c: insert(c, 3)),
        return_exceptions=True,
    )
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], NotADirectoryError)
    assert outcomes[2] == 3
    assert done == [1]
    assert await database.read(count) == 2
    await database.close()


async def test_writes_that_wait_share_one_commit(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    gate = threading.Event()
    commits: list[str] = []

    def slow(connection: sqlite3.Connection) -> None:
        gate.wait(10)
        connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)

    first = asyncio.create_task(database.write(slow))
    await asyncio.sleep(0)
    works = [partial(insert, number=n) for n in range(100)]
    writes = [asyncio.create_task(database.write(work)) for work in works]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *writes)
    assert len(commits) <= 2
    assert await database.read(count) == 100
    await database.close()


async def test_a_cancelled_write_harms_nobody(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    gate = threading.Event()
    first = asyncio.create_task(database.write(lambda _: gate.wait(10)))
    second = asyncio.create_task(database.write(lambda c: insert(c, 1)))
    await asyncio.sleep(0)
    second.cancel()
    gate.set()
    await first
    assert await database.write(lambda c: insert(c, 2)) == 2
    await database.close()


async def test_readers_cannot_write_and_see_one_state(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    with pytest.raises(FailedPreconditionError):
        await database.read(lambda c: insert(c, 1))
    assert await database.read(count) == 0
    await database.close()


async def test_more_writes_than_may_wait_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    database = await Database.open(tmp_path / "d.db", [ONE])
    started, gate = threading.Event(), threading.Event()

    def hold(_: sqlite3.Connection) -> None:
        started.set()
        gate.wait(10)

    held = asyncio.create_task(database.write(hold))
    await asyncio.sleep(0)
    await asyncio.to_thread(started.wait, 10)
    works = [partial(insert, number=n) for n in range(5)]
    waiting = [asyncio.create_task(database.write(work)) for work in works]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(held, *waiting, return_exceptions=True)
    assert isinstance(outcomes[-1], UnavailableError)
    assert await database.read(count) == 4
    await database.close()


async def test_the_log_does_not_grow_with_the_number_of_writes(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [TWO])
    filler = "x" * 3000

    def replace(connection: sqlite3.Connection, number: int) -> None:
        connection.execute("REPLACE INTO things VALUES (?, ?)", (number % 50, filler))

    for number in range(1500):
        await database.write(partial(replace, number=number))
    log = (tmp_path / "d.db-wal").stat().st_size
    assert log < 2 * module.LOG_BYTES  # the pages written are some 15 MB
    await database.close()


async def test_a_closed_database_says_so(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d.db", [ONE])
    await database.close()
    with pytest.raises(UnavailableError, match="closed"):
        await database.write(count)
    with pytest.raises(UnavailableError, match="closed"):
        await database.read(count)


async def test_a_migration_keeps_the_rows_and_leaves_a_copy_of_before(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    old = await Database.open(path, [ONE])
    await old.write(lambda c: insert(c, 1))
    await old.close()
    new = await Database.open(path, [TWO])
    rows = await new.read(lambda c: c.execute("SELECT n, name FROM things").fetchall())
    assert rows == [(1, None)]
    await new.close()
    copy = sqlite3.connect(tmp_path / "d.db.before-things-2")
    assert copy.execute("SELECT * FROM things").fetchall() == [(1,)]
    copy.close()


async def test_a_database_of_a_newer_ember_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    await (await Database.open(path, [TWO])).close()
    with pytest.raises(FailedPreconditionError, match=r"'things' have version 2.*knows 1"):
        await Database.open(path, [ONE])


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    await (await Database.open(path, [ONE])).close()
    broken = SchemaPiece("things", (*ONE.migrations, "CREATE TABLE more (n); NONSENSE;"))
    with pytest.raises(UnavailableError):
        await Database.open(path, [broken])
    again = await Database.open(path, [ONE])
    tables = await again.read(
        lambda c: c.execute("SELECT 1 FROM sqlite_master WHERE name = 'more'").fetchall()
    )
    assert tables == []
    await again.close()


async def test_pieces_of_several_modules_live_in_one_database(tmp_path: Path) -> None:
    other = SchemaPiece("other", ("CREATE TABLE other (n); INSERT INTO other VALUES (5);",))
    path = tmp_path / "d.db"
    await (await Database.open(path, [ONE])).close()
    database = await Database.open(path, [ONE, other])
    assert await database.read(lambda c: c.execute("SELECT n FROM other").fetchone()) == (5,)
    await database.close()
    assert not list(tmp_path.glob("*.before-*"))


@pytest.mark.parametrize(
    "content", [b"no database at all" * 1000, b"SQLite format 3\0" + b"\7" * 9000]
)
async def test_a_damaged_file_is_refused_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.db").write_bytes(content)
    with pytest.raises(CorruptError, match="move it away"):
        await Database.open(tmp_path / "d.db", [ONE])


async def test_a_directory_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.db").mkdir()
    with pytest.raises(UnavailableError, match=r"d\.db"):
        await Database.open(tmp_path / "d.db", [ONE])
