"""Snapshots as rows: containerd's rules about names, parents and kinds, enforced in one place.

Every function takes a connection inside a transaction of Database and touches nothing else. A row's
id names its directory, stays with it when it is committed, and is never used again. Order of the
checks and error classes are those of containerd's own store (core/snapshots/storage).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from snapshotter.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from snapshotter.snapshots.labels import SNAPSHOT_REF
from snapshotter.snapshots.model import Info, Kind, Usage
from snapshotter.snapshots.schema import SchemaPiece

MAX_NAME_BYTES: Final = 32 * 1024

SCHEMA: Final = SchemaPiece(
    "snapshots",
    (
        """
        CREATE TABLE snapshots (
          id INTEGER PRIMARY KEY AUTOINCREMENT,
          name TEXT NOT NULL UNIQUE,
          parent_id INTEGER REFERENCES snapshots (id),
          kind INTEGER NOT NULL,
          created_ns INTEGER NOT NULL,
          updated_ns INTEGER NOT NULL,
          size_bytes INTEGER,
          inodes INTEGER,
          layer TEXT,
          view TEXT,
          owner_pending INTEGER NOT NULL DEFAULT 0
        );
        CREATE INDEX snapshots_by_parent ON snapshots (parent_id);
        CREATE INDEX snapshots_lazy ON snapshots (layer) WHERE layer IS NOT NULL;
        CREATE TABLE snapshot_labels (
          snapshot_id INTEGER NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
          key TEXT NOT NULL,
          value TEXT NOT NULL,
          PRIMARY KEY (snapshot_id, key)
        ) WITHOUT ROWID;
        CREATE INDEX snapshot_labels_by_value ON snapshot_labels (key, value);
        """,
    ),
)

_COLUMNS = (
    "s.id, s.name, p.name, s.parent_id, s.kind, s.created_ns, s.updated_ns, s.size_bytes, s.inodes,"
    " s.layer, s.view, s.owner_pending"
)
_FROM = "FROM snapshots s LEFT JOIN snapshots p ON p.id = s.parent_id"


@dataclass(frozen=True, slots=True)
class Record:
    """A row. ``usage`` is None until it was measured; ``layer`` and ``view`` are set if lazy.

    ``owner_pending``: the directory's owner has still to be copied from the parent's root.
    """

    id: int
    parent_id: int | None
    info: Info
    usage: Usage | None
    layer: str | None
    view: str | None
    owner_pending: bool


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One snapshot of a chain, as far as stacking needs it."""

    id: int
    name: str
    layer: str | None
    view: str | None
    chain_id: str | None


def check_name(name: str, what: str) -> None:
    """InvalidArgumentError unless ``name`` can be a key: 1 to 32,768 bytes."""
    if not name:
        raise InvalidArgumentError(f"the {what} of a snapshot must not be empty")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgumentError(
            f"the {what} {name[:64]!r}… of a snapshot is longer than {MAX_NAME_BYTES} bytes"
        )


def find(connection: sqlite3.Connection, name: str) -> Record | None:
    """The snapshot of this key or name, with its labels."""
    return _one(connection, "WHERE s.name = ?", name)


def get(connection: sqlite3.Connection, name: str) -> Record:
    """As find, but NotFoundError where there is none."""
    record = find(connection, name)
    if record is None:
        raise NotFoundError(f"snapshot {name!r} does not exist")
    return record


def get_mountable(connection: sqlite3.Connection, key: str) -> Record:
    """As get, but FailedPreconditionError for a committed one: only others have mounts."""
    record = get(connection, key)
    if record.info.kind is Kind.COMMITTED:
        raise FailedPreconditionError(
            f"snapshot {key!r} is committed; mount a view of it or prepare one on it"
        )
    return record


def chain(connection: sqlite3.Connection, snapshot_id: int | None) -> tuple[ChainRow, ...]:
    """The snapshot and all that it stands on, the lowest first; empty for None."""
    if snapshot_id is None:
        return ()
    rows = connection.execute(
        "WITH RECURSIVE up (id, depth) AS ("
        " VALUES (?, 0) UNION ALL"
        " SELECT s.parent_id, up.depth + 1 FROM snapshots s JOIN up ON s.id = up.id"
        " WHERE s.parent_id IS NOT NULL)"
        " SELECT s.id, s.name, s.layer, s.view, l.value FROM up JOIN snapshots s ON s.id = up.id"
        " LEFT JOIN snapshot_labels l ON l.snapshot_id = s.id AND l.key = ?"
        " ORDER BY up.depth DESC",
        (snapshot_id, SNAPSHOT_REF),
    )
    return tuple(ChainRow(*row) for row in rows)


def parent_for(connection: sqlite3.Connection, parent: str) -> int | None:
    """The id of a parent that something new may stand on, None for "".

    NotFoundError if it is missing, InvalidArgumentError if it isn't committed.
    """
    if not parent:
        return None
    row = connection.execute("SELECT id, kind FROM snapshots WHERE name = ?", (parent,)).fetchone()
    if row is None:
        raise NotFoundError(f"parent snapshot {parent!r} does not exist")
    if row[1] != Kind.COMMITTED:
        raise InvalidArgumentError(f"parent snapshot {parent!r} is not committed")
    return int(row[0])


def check_new(connection: sqlite3.Connection, key: str, parent: str) -> int | None:
    """The parent's id, if ``key`` may be made on it now; errors as ``create``."""
    parent_id = parent_for(connection, parent)
    if connection.execute("SELECT 1 FROM snapshots WHERE name = ?", (key,)).fetchone():
        raise AlreadyExistsError(f"snapshot {key!r} exists")
    return parent_id


def create(
    connection: sqlite3.Connection,
    snapshot_id: int,
    kind: Kind,
    key: str,
    parent: str,
    labels: Mapping[str, str],
    now_ns: int,
    *,
    owner_pending: bool = False,
) -> None:
    """Add an active snapshot or a view; the parent is checked before the key."""
    parent_id = check_new(connection, key, parent)
    connection.execute(
        "INSERT INTO snapshots (id, name, parent_id, kind, created_ns, updated_ns, owner_pending)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (snapshot_id, key, parent_id, int(kind), now_ns, now_ns, int(owner_pending)),
    )
    _put_labels(connection, snapshot_id, labels)


def find_layer(connection: sqlite3.Connection, chain_id: str, parent_id: int | None) -> str | None:
    """The name of a committed snapshot with this snapshot.ref on exactly this parent."""
    row = connection.execute(
        "SELECT s.name FROM snapshot_labels l JOIN snapshots s ON s.id = l.snapshot_id"
        " WHERE l.key = ? AND l.value = ? AND s.kind = ? AND s.parent_id IS ? LIMIT 1",
        (SNAPSHOT_REF, chain_id, int(Kind.COMMITTED), parent_id),
    ).fetchone()
    return None if row is None else str(row[0])


def create_lazy(
    connection: sqlite3.Connection,
    snapshot_id: int,
    chain_id: str,
    parent: str,
    labels: Mapping[str, str],
    now_ns: int,
    layer: str,
    view: str,
) -> bool:
    """Add a committed row for a lazy layer, named by its chainID; False if there is one already.

    The same layer on another parent (another namespace unpacked below it) has ``@parent`` added.
    """
    parent_id = parent_for(connection, parent)
    if find_layer(connection, chain_id, parent_id) is not None:
        return False
    name, attempt = chain_id, 0
    while connection.execute("SELECT 1 FROM snapshots WHERE name = ?", (name,)).fetchone():
        attempt += 1
        name = f"{chain_id}@{parent}" + (f"#{attempt}" if attempt > 1 else "")
    check_name(name, "name")
    connection.execute(
        "INSERT INTO snapshots (id, name, parent_id, kind, created_ns, updated_ns, layer, view)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (snapshot_id, name, parent_id, int(Kind.COMMITTED), now_ns, now_ns, layer, view),
    )
    _put_labels(connection, snapshot_id, labels)
    return True


def commit(
    connection: sqlite3.Connection,
    name: str,
    key: str,
    parent: str,
    labels: Mapping[str, str],
    now_ns: int,
) -> int:
    """Turn the active ``key`` into the committed ``name``; the id is kept and returned.

    ``parent`` (containerd 2.2) gives one to a snapshot that was made without.
    """
    if connection.execute("SELECT 1 FROM snapshots WHERE name = ?", (name,)).fetchone():
        raise AlreadyExistsError(f"committed snapshot {name!r} exists")
    record = get(connection, key)
    if record.info.kind is not Kind.ACTIVE:
        raise FailedPreconditionError(f"snapshot {key!r} is {record.info.kind.word}, not active")
    parent_id = record.parent_id
    if parent and parent != record.info.parent:
        if record.info.parent:
            raise InvalidArgumentError(
                f"snapshot {key!r} stands on {record.info.parent!r}; committing it cannot put it "
                f"on {parent!r}"
            )
        try:
            parent_id = parent_for(connection, parent)
        except InvalidArgumentError as error:
            raise FailedPreconditionError(str(error)) from None
    connection.execute(
        "UPDATE snapshots SET name = ?, kind = ?, parent_id = ?, created_ns = ?, updated_ns = ?,"
        " size_bytes = NULL, inodes = NULL WHERE id = ?",
        (name, int(Kind.COMMITTED), parent_id, now_ns, now_ns, record.id),
    )
    _put_labels(connection, record.id, labels)
    return record.id


def remove(connection: sqlite3.Connection, key: str) -> Record:
    """Delete a row of any kind and return it; FailedPreconditionError while it has children."""
    record = get(connection, key)
    child = connection.execute(
        "SELECT name FROM snapshots WHERE parent_id = ? LIMIT 1", (record.id,)
    ).fetchone()
    if child is not None:
        raise FailedPreconditionError(
            f"cannot remove snapshot {key!r}: {child[0]!r} stands on it; remove that first"
        )
    connection.execute("DELETE FROM snapshots WHERE id = ?", (record.id,))
    return record


def update(
    connection: sqlite3.Connection,
    name: str,
    labels: Mapping[str, str],
    paths: Sequence[str],
    now_ns: int,
) -> Info:
    """Change labels as a field mask says; no path at all means all labels."""
    record = get(connection, name)
    merged = dict(record.info.labels) if paths else dict(labels)
    for path in paths:
        field, _, key = path.partition(".")
        if field != "labels" or path == "labels.":
            raise InvalidArgumentError(f"field {path!r} of snapshot {name!r} cannot be changed")
        if key:
            merged[key] = labels.get(key, "")
        else:
            merged = dict(labels)
    connection.execute("UPDATE snapshots SET updated_ns = ? WHERE id = ?", (now_ns, record.id))
    merged = {key: value for key, value in merged.items() if value}
    _put_labels(connection, record.id, merged)
    info = record.info
    return Info(info.name, info.parent, info.kind, info.created_ns, now_ns, merged)


def set_usage(connection: sqlite3.Connection, snapshot_id: int, usage: Usage) -> None:
    """Store what a committed snapshot takes; nothing happens if it is gone or isn't committed."""
    connection.execute(
        "UPDATE snapshots SET size_bytes = ?, inodes = ? WHERE id = ? AND kind = ?",
        (usage.size_bytes, usage.inodes, snapshot_id, int(Kind.COMMITTED)),
    )


def owner_copied(connection: sqlite3.Connection, snapshot_id: int) -> None:
    """The directory has its owner now."""
    connection.execute("UPDATE snapshots SET owner_pending = 0 WHERE id = ?", (snapshot_id,))


def page(connection: sqlite3.Connection, after_id: int, limit: int) -> list[Record]:
    """The next ``limit`` snapshots by id: a commit while a list is read neither hides nor doubles
    an entry, since ids stay."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} {_FROM} WHERE s.id > ? ORDER BY s.id LIMIT ?", (after_id, limit)
    ).fetchall()
    if not rows:
        return []
    labels: dict[int, dict[str, str]] = {row[0]: {} for row in rows}
    for snapshot_id, key, value in connection.execute(
        "SELECT snapshot_id, key, value FROM snapshot_labels WHERE snapshot_id BETWEEN ? AND ?",
        (rows[0][0], rows[-1][0]),
    ):
        labels[snapshot_id][key] = value
    return [_record(row, labels[row[0]]) for row in rows]


def by_id(connection: sqlite3.Connection, snapshot_id: int) -> Record | None:
    """The snapshot of this id."""
    return _one(connection, "WHERE s.id = ?", snapshot_id)


def ids_by_name(connection: sqlite3.Connection, name: str) -> list[int]:
    """At most one id."""
    return _ids(connection, "SELECT id FROM snapshots WHERE name = ?", name)


def ids_by_label(connection: sqlite3.Connection, key: str, value: str) -> list[int]:
    """Ids of the snapshots with this label."""
    return _ids(
        connection,
        "SELECT snapshot_id FROM snapshot_labels WHERE key = ? AND value = ?",
        key,
        value,
    )


def ids_by_parent(connection: sqlite3.Connection, parent: str) -> list[int]:
    """Ids of the snapshots that stand on this name."""
    return _ids(
        connection,
        "SELECT s.id FROM snapshots s JOIN snapshots p ON p.id = s.parent_id WHERE p.name = ?",
        parent,
    )


def all_ids(connection: sqlite3.Connection) -> list[tuple[int, Kind, bool]]:
    """(id, kind, is lazy) of every snapshot, in order."""
    rows = connection.execute("SELECT id, kind, layer IS NOT NULL FROM snapshots ORDER BY id")
    return [(row[0], Kind(row[1]), bool(row[2])) for row in rows]


def lazy_ids(connection: sqlite3.Connection) -> list[int]:
    """Ids of all lazy layers, parents before children."""
    return _ids(connection, "SELECT id FROM snapshots WHERE layer IS NOT NULL ORDER BY id")


def last_id(connection: sqlite3.Connection) -> int:
    """The highest id that was ever used, also by snapshots that are gone."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'snapshots'").fetchone()
    return 0 if row is None else int(row[0])


def _ids(connection: sqlite3.Connection, query: str, *values: str) -> list[int]:
    return [row[0] for row in connection.execute(query, values)]


def _one(connection: sqlite3.Connection, where: str, value: str | int) -> Record | None:
    row = connection.execute(f"SELECT {_COLUMNS} {_FROM} {where}", (value,)).fetchone()
    if row is None:
        return None
    labels = connection.execute(
        "SELECT key, value FROM snapshot_labels WHERE snapshot_id = ?", (row[0],)
    )
    return _record(row, dict(labels.fetchall()))


def _record(row: tuple[object, ...], labels: dict[str, str]) -> Record:
    (ident, name, parent, parent_id, kind, created, updated, size, inodes, layer, view, pending) = (
        row
    )
    info = Info(str(name), str(parent or ""), Kind(int(kind)), int(created), int(updated), labels)  # type: ignore[call-overload]
    usage = None if size is None else Usage(int(size), int(inodes))  # type: ignore[call-overload]
    return Record(ident, parent_id, info, usage, layer, view, bool(pending))  # type: ignore[arg-type]


def _put_labels(
    connection: sqlite3.Connection, snapshot_id: int, labels: Mapping[str, str]
) -> None:
    connection.execute("DELETE FROM snapshot_labels WHERE snapshot_id = ?", (snapshot_id,))
    connection.executemany(
        "INSERT INTO snapshot_labels (snapshot_id, key, value) VALUES (?, ?, ?)",
        [(snapshot_id, key, value) for key, value in labels.items()],
    )
