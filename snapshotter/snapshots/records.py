"""Rows of snapshots read back as values: one by key, a chain, a page, the ids that an index finds.

Every function takes a connection inside a transaction of Database and changes nothing. Cost is that
of the answer, not of the number of snapshots.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from snapshotter.errors import FailedPreconditionError, NotFoundError
from snapshotter.snapshots.labels import SNAPSHOT_REF
from snapshotter.snapshots.model import Info, Kind, Usage

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

    @property
    def version(self) -> Version:
        """Which state of the row this is."""
        return Version(self.id, int(self.info.kind), self.info.updated_ns)


class Version(NamedTuple):
    """A state of a row: all that List says of it stays as long as these do.

    A commit changes the kind, an update the time; a parent's name is that of a committed snapshot,
    which never changes.
    """

    id: int
    kind: int
    updated_ns: int


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One snapshot of a chain, as far as stacking needs it."""

    id: int
    name: str
    layer: str | None
    view: str | None
    chain_id: str | None


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


def find_layer(connection: sqlite3.Connection, chain_id: str, parent_id: int | None) -> str | None:
    """The name of a committed snapshot with this snapshot.ref on exactly this parent."""
    row = connection.execute(
        "SELECT s.name FROM snapshot_labels l JOIN snapshots s ON s.id = l.snapshot_id"
        " WHERE l.key = ? AND l.value = ? AND s.kind = ? AND s.parent_id IS ? LIMIT 1",
        (SNAPSHOT_REF, chain_id, int(Kind.COMMITTED), parent_id),
    ).fetchone()
    return None if row is None else str(row[0])


def is_unpacked_now(connection: sqlite3.Connection, chain_id: str) -> bool:
    """Whether an active snapshot has this snapshot.ref: somebody is unpacking the layer."""
    row = connection.execute(
        "SELECT 1 FROM snapshot_labels l JOIN snapshots s ON s.id = l.snapshot_id"
        " WHERE l.key = ? AND l.value = ? AND s.kind = ? LIMIT 1",
        (SNAPSHOT_REF, chain_id, int(Kind.ACTIVE)),
    ).fetchone()
    return row is not None


def committed_chain_ids(connection: sqlite3.Connection) -> set[str]:
    """What the names of committed snapshots end with: containerd puts more before it."""
    rows = connection.execute("SELECT name FROM snapshots WHERE kind = ?", (int(Kind.COMMITTED),))
    return {str(name).rpartition("/")[2] for (name,) in rows}


def versions(connection: sqlite3.Connection, after_id: int, limit: int) -> list[Version]:
    """The next ``limit`` snapshots by id: a commit while a list is read neither hides nor doubles
    an entry, since ids stay."""
    rows = connection.execute(
        "SELECT id, kind, updated_ns FROM snapshots WHERE id > ? ORDER BY id LIMIT ?",
        (after_id, limit),
    )
    return [Version(*row) for row in rows]


def among(connection: sqlite3.Connection, ids: Sequence[int]) -> list[Record]:
    """Those of the snapshots that there are, by id; at most a few hundred ``ids``."""
    marks = ", ".join("?" * len(ids))
    rows = connection.execute(
        f"SELECT {_COLUMNS} {_FROM} WHERE s.id IN ({marks}) ORDER BY s.id", ids
    ).fetchall()
    labels: dict[int, dict[str, str]] = {row[0]: {} for row in rows}
    for snapshot_id, key, value in connection.execute(
        f"SELECT snapshot_id, key, value FROM snapshot_labels WHERE snapshot_id IN ({marks})", ids
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


def lazy_layers(connection: sqlite3.Connection) -> frozenset[str]:
    """The blobs of all lazy layers that some snapshot stands for."""
    rows = connection.execute("SELECT DISTINCT layer FROM snapshots WHERE layer IS NOT NULL")
    return frozenset(layer for (layer,) in rows)


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


def _record(row: tuple[Any, ...], labels: dict[str, str]) -> Record:
    (ident, name, parent, parent_id, kind, created, updated, size, inodes, layer, view, pending) = (
        row
    )
    info = Info(name, parent or "", Kind(kind), created, updated, labels)
    usage = None if size is None else Usage(size, inodes)
    return Record(ident, parent_id, info, usage, layer, view, bool(pending))
