"""What must not be forgotten of indexes: artifacts that lied, and images whose own were pushed.

Kept in the daemon's database, mirrored in memory, the last few thousand of each.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from snapshotter.content import Digest
from snapshotter.imagefs.catalog import Store
from snapshotter.snapshots.schema import SchemaPiece

KEPT = 4096

PIECE = SchemaPiece(
    "indexes",
    (
        """
    CREATE TABLE wrong_indexes (
        layer TEXT NOT NULL,
        artifact TEXT NOT NULL,
        repository TEXT NOT NULL,
        reason TEXT NOT NULL,
        seen_ns INTEGER NOT NULL,
        PRIMARY KEY (layer, artifact)
    ) STRICT;
    CREATE TABLE pushed_indexes (
        image TEXT NOT NULL,
        repository TEXT NOT NULL,
        pushed_ns INTEGER NOT NULL,
        PRIMARY KEY (image, repository)
    ) STRICT;
    """,
        "ALTER TABLE pushed_indexes ADD COLUMN key TEXT NOT NULL DEFAULT '';",
    ),
)


@dataclass(frozen=True, slots=True)
class Wrong:
    """An index that was compared with its layer and is not of it. ``artifact`` may be unknown."""

    layer: Digest
    artifact: Digest | None
    repository: str
    reason: str

    @property
    def source(self) -> str:
        """Where it came from, as words behind what it is."""
        return f"that came from {self.repository}" if self.repository else "of unknown origin"

    @property
    def consequence(self) -> str:
        """What is done about it, to end a sentence; empty if nobody knows what brought it."""
        return f"; its artifact {self.artifact} is never used again" if self.artifact else ""


class Verdicts:
    """Life story: ``load`` once, then note and ask."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wrong: dict[tuple[Digest, str], Wrong] = {}
        self._pushed: dict[tuple[str, str], str] = {}

    async def load(self) -> None:
        """Read everything back."""

        def work(db: sqlite3.Connection) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
            wrong = db.execute(
                "SELECT layer, artifact, repository, reason FROM wrong_indexes ORDER BY seen_ns"
            )
            pushed = db.execute(
                "SELECT image, repository, key FROM pushed_indexes ORDER BY pushed_ns"
            )
            return wrong.fetchall(), pushed.fetchall()

        wrong, pushed = await self._store.read(work)
        for layer, artifact, repository, reason in wrong:
            known = Digest.parse(artifact) if artifact else None
            one = Wrong(Digest.parse(layer), known, repository, reason)
            self._wrong[one.layer, artifact] = one
        self._pushed = {(image, repository): key for image, repository, key in pushed}

    async def condemn(self, wrong: Wrong, seen_ns: int) -> None:
        """The index was wrong: its artifact is never used again."""
        artifact = str(wrong.artifact or "")
        old = [] if (wrong.layer, artifact) in self._wrong else list(self._wrong)[: 1 - KEPT]
        row = (str(wrong.layer), artifact, wrong.repository, wrong.reason, seen_ns)

        def work(db: sqlite3.Connection) -> None:
            db.executemany(
                "DELETE FROM wrong_indexes WHERE layer = ? AND artifact = ?",
                [(str(layer), other) for layer, other in old],
            )
            db.execute("INSERT OR REPLACE INTO wrong_indexes VALUES (?, ?, ?, ?, ?)", row)

        await self._store.write(work)
        for key in old:
            self._wrong.pop(key, None)
        self._wrong[wrong.layer, artifact] = wrong

    def of_artifact(self, artifact: Digest) -> str | None:
        """Why an artifact is not used again; None for one that nothing is known against."""
        for wrong in self._wrong.values():
            if wrong.artifact == artifact:
                return f"what it gave for layer {wrong.layer} was wrong: {wrong.reason}"
        return None

    def of_layer(self, layer: Digest) -> Wrong | None:
        """The last wrong index of a layer."""
        return next((w for w in reversed(self._wrong.values()) if w.layer == layer), None)

    def wrong(self) -> list[Wrong]:
        """All of them, the last one first."""
        return list(reversed(self._wrong.values()))

    def pushed(self, image: Digest, repository: str) -> str | None:
        """The key that signed the indexes for the image that lie in the repository, by us or seen
        by us; empty if none did, None if none lie there."""
        return self._pushed.get((str(image), repository))

    async def note_pushed(self, image: Digest, repository: str, key: str, pushed_ns: int) -> None:
        """Indexes for the image lie in the repository, signed by ``key``."""
        place = (str(image), repository)
        old = [] if place in self._pushed else list(self._pushed)[: 1 - KEPT]

        def work(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM pushed_indexes WHERE image = ? AND repository = ?", old)
            db.execute(
                "INSERT OR REPLACE INTO pushed_indexes (image, repository, key, pushed_ns)"
                " VALUES (?, ?, ?, ?)",
                (*place, key, pushed_ns),
            )

        await self._store.write(work)
        for one in old:
            self._pushed.pop(one, None)
        self._pushed[place] = key
