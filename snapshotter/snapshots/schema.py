"""Versions of tables: each module brings its piece, and a database is brought up to date at open.

A piece's version is the number of its migrations. Applied ones are never edited: a change is a new
one at the end. Before an existing piece is changed the whole database is copied beside itself.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import FailedPreconditionError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchemaPiece:
    """The tables of one module; ``migrations[n]`` is the SQL that leads to version n + 1."""

    name: str
    migrations: tuple[str, ...]


def migrate(connection: sqlite3.Connection, path: Path, pieces: Sequence[SchemaPiece]) -> None:
    """Apply what is missing, all in one transaction.

    FailedPreconditionError, by name, where the file is newer than the program.
    """
    connection.execute(
        "CREATE TABLE IF NOT EXISTS schema_versions"
        " (piece TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
    )
    found = dict(connection.execute("SELECT piece, version FROM schema_versions").fetchall())
    behind = []
    for piece in pieces:
        version, known = found.get(piece.name, 0), len(piece.migrations)
        if version > known:
            raise FailedPreconditionError(
                f"{path}: its tables {piece.name!r} have version {version}, written by a newer "
                f"Ember; this one knows {known}. Install that Ember again, or put the copy "
                f"{path.name}.before-{piece.name}-{known + 1} back if there is one"
            )
        if version < known:
            behind.append((piece, version))
    if not behind:
        return
    for piece, version in behind:
        if version > 0:
            _back_up(connection, path.with_name(f"{path.name}.before-{piece.name}-{version + 1}"))
    connection.execute("BEGIN IMMEDIATE")
    try:
        for piece, version in behind:
            _apply(connection, piece, version)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _apply(connection: sqlite3.Connection, piece: SchemaPiece, version: int) -> None:
    for script in piece.migrations[version:]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute(
        "INSERT INTO schema_versions (piece, version) VALUES (?, ?)"
        " ON CONFLICT (piece) DO UPDATE SET version = excluded.version",
        (piece.name, len(piece.migrations)),
    )


def _statements(script: str) -> list[str]:
    """Split a script; executescript() would commit the transaction it runs in."""
    statements, current = [], ""
    for part in script.split(";"):
        current += part + ";"
        if sqlite3.complete_statement(current):
            if current.strip(" \n;"):
                statements.append(current)
            current = ""
    return statements


def _back_up(connection: sqlite3.Connection, target: Path) -> None:
    if target.exists():
        return
    partial = target.with_name(target.name + ".new")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as copy:
        connection.backup(copy)
    partial.rename(target)
    _log.info("copied the database to %s before changing its tables", target)
