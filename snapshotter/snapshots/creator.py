"""New snapshots: a directory, then its row; whatever goes wrong, not one without the other.

The directory is made by the database's writer right before the transaction: one hand-over between
threads instead of two is a good part of what a Prepare costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from snapshotter.clock import Clock
from snapshotter.errors import UnavailableError
from snapshotter.snapshots import metastore
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.lazy import LazyLayer
from snapshotter.snapshots.model import Kind
from snapshotter.snapshots.storage import Storage


@dataclass(frozen=True, slots=True)
class NewSnapshot:
    """An active snapshot or a view to be made. Its root gets the owner of the root of
    ``owner_of``, or gets it later (``owner_pending``), when the layer below can be read."""

    kind: Kind
    key: str
    parent: str
    labels: Mapping[str, str]
    owner_of: int | None
    owner_pending: bool


class Creator:
    """Makes rows with their directories. A caller must not be cancelled in the middle."""

    def __init__(self, database: Database, storage: Storage, clock: Clock) -> None:
        self._db = database
        self._storage = storage
        self._clock = clock

    async def create(self, new: NewSnapshot) -> tuple[int, bool]:
        """Make it; its id, and whether its root has its owner already.

        Errors of metastore.create, or OSError of the disk.
        """
        snapshot_id = self._storage.reserve()
        now_ns = self._clock.wall_ns()
        owned = False

        def make() -> None:
            nonlocal owned
            owned = self._storage.make_now(snapshot_id, new.kind, new.owner_of)

        try:
            await self._db.write(
                lambda c: metastore.create(
                    c,
                    snapshot_id,
                    new.kind,
                    new.key,
                    new.parent,
                    new.labels,
                    now_ns,
                    owner_pending=new.owner_pending or not owned,
                ),
                first=make,
            )
        except BaseException:
            await self._storage.discard(snapshot_id)
            raise
        finally:
            self._storage.settled(snapshot_id)
        return snapshot_id, owned and not new.owner_pending

    async def take(
        self, chain_id: str, parent: str, labels: Mapping[str, str], layer: LazyLayer
    ) -> None:
        """Make a committed snapshot for a lazy layer, unless there is one on this parent."""
        snapshot_id = self._storage.reserve()
        now_ns = self._clock.wall_ns()
        origin = (str(layer.layer), str(layer.view))
        created = False
        try:
            created = await self._db.write(
                lambda c: metastore.create_lazy(
                    c, snapshot_id, chain_id, parent, labels, now_ns, *origin
                ),
                first=partial(self._storage.make_now, snapshot_id, Kind.COMMITTED),
            )
        finally:
            if not created:
                await self._storage.discard(snapshot_id)
            self._storage.settled(snapshot_id)

    async def copy_owner(self, parent_id: int, snapshot_id: int) -> None:
        """Give a root the owner that could not be read when it was made; UnavailableError if it
        can't be read now either."""
        if not await self._storage.copy_owner(parent_id, snapshot_id):
            raise UnavailableError(
                f"the layer below, {self._storage.layer(parent_id)}, is not there just now; try"
                " again, or remove the image and pull it again"
            )
        await self._db.write(lambda c: metastore.owner_copied(c, snapshot_id))
