"""Snapshots as rows: containerd's rules about names, parents and kinds, enforced in one place.

Every function takes a connection inside a transaction of Database and touches nothing else. A row's
id names its directory, stays with it when it is committed, and is never used again. Order of the
checks and error classes are those of containerd's own store (core/snapshots/storage).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

from snapshotter.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from snapshotter.snapshots.labels import SNAPSHOT_REF
from snapshotter.snapshots.model import Info, Kind, Usage
from snapshotter.snapshots.records import Record, find_layer, get
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


def check_name(name: str, what: str) -> None:
    """InvalidArgumentError unless ``name`` can be a key: 1 to 32,768 bytes."""
    if not name:
        raise InvalidArgumentError(f"the {what} of a snapshot must not be empty")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgumentError(
            f"the {what} {name[:64]!r}… of a snapshot is longer than {MAX_NAME_BYTES} bytes"
        )


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
    _put_labels(connection, snapshot_id, labels, is_new=True)


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
    _put_labels(connection, snapshot_id, labels, is_new=True)
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
    if labels.get(SNAPSHOT_REF):
        _retire_lazy(connection, labels[SNAPSHOT_REF], parent_id)
    return record.id


def _retire_lazy(connection: sqlite3.Connection, chain_id: str, parent_id: int | None) -> None:
    """A layer was unpacked beside one that had been taken lazily, since that one is unfit: from
    now on only what was unpacked is found."""
    found = connection.execute(
        "SELECT s.id FROM snapshots s JOIN snapshot_labels l ON l.snapshot_id = s.id"
        " WHERE s.layer IS NOT NULL AND s.parent_id IS ? AND l.key = ? AND l.value = ?",
        (parent_id, SNAPSHOT_REF, chain_id),
    )
    for (snapshot_id,) in found.fetchall():
        forget_layer(connection, snapshot_id)


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
    updated_ns = max(now_ns, record.info.updated_ns + 1)  # a clock set back makes no old version
    connection.execute("UPDATE snapshots SET updated_ns = ? WHERE id = ?", (updated_ns, record.id))
    merged = {key: value for key, value in merged.items() if value}
    _put_labels(connection, record.id, merged)
    info = record.info
    return Info(info.name, info.parent, info.kind, info.created_ns, updated_ns, merged)


def set_usage(connection: sqlite3.Connection, snapshot_id: int, usage: Usage) -> None:
    """Store what a committed snapshot takes; nothing happens if it is gone or isn't committed."""
    connection.execute(
        "UPDATE snapshots SET size_bytes = ?, inodes = ? WHERE id = ? AND kind = ?",
        (usage.size_bytes, usage.inodes, snapshot_id, int(Kind.COMMITTED)),
    )


def forget_layer(connection: sqlite3.Connection, snapshot_id: int) -> None:
    """No Prepare shall be told that this layer is here: its content is lost, or unfit.

    The time moves on, since it tells one state of a row from another (records.Version).
    """
    connection.execute(
        "DELETE FROM snapshot_labels WHERE snapshot_id = ? AND key = ?", (snapshot_id, SNAPSHOT_REF)
    )
    connection.execute(
        "UPDATE snapshots SET updated_ns = updated_ns + 1 WHERE id = ?", (snapshot_id,)
    )


def owner_copied(connection: sqlite3.Connection, snapshot_id: int) -> None:
    """The directory has its owner now."""
    connection.execute("UPDATE snapshots SET owner_pending = 0 WHERE id = ?", (snapshot_id,))


def _put_labels(
    connection: sqlite3.Connection,
    snapshot_id: int,
    labels: Mapping[str, str],
    *,
    is_new: bool = False,
) -> None:
    if not is_new:
        connection.execute("DELETE FROM snapshot_labels WHERE snapshot_id = ?", (snapshot_id,))
    connection.executemany(
        "INSERT INTO snapshot_labels (snapshot_id, key, value) VALUES (?, ?, ?)",
        [(snapshot_id, key, value) for key, value in labels.items()],
    )
