"""The ten verbs of containerd's snapshot contract, over rows, directories and lazy layers.

Order is what makes a kill at any point harmless: directory before row, row before answer, row away
before directory away. Whatever the network does, Prepare and View end within seconds and Remove,
Commit, Stat and Update are local: containerd holds locks across them. Once a change has begun it is
finished, also if the client hangs up. Knows neither gRPC nor how a layer becomes lazy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from snapshotter.clock import Clock, SystemClock
from snapshotter.content import Digest
from snapshotter.errors import (
    AlreadyExistsError,
    ConfigError,
    EmberError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from snapshotter.snapshots import labels as known
from snapshotter.snapshots import metastore, overlay, records
from snapshotter.snapshots.claims import Claims
from snapshotter.snapshots.creator import Creator, NewSnapshot
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.lazy import LazyLayers, StackEntry
from snapshotter.snapshots.listing import Listing
from snapshotter.snapshots.measurer import Measurer
from snapshotter.snapshots.model import Info, Kind, Mount, Usage
from snapshotter.snapshots.records import ChainRow, Record
from snapshotter.snapshots.settled import Settled
from snapshotter.snapshots.storage import Storage
from snapshotter.unbroken import Unbroken

T = TypeVar("T")

_log = logging.getLogger(__name__)


INDEX_SHARE = 0.75
"""Of the time for mounting before an answer: to wait for indexes. The rest is for mounts."""


@dataclass(frozen=True, slots=True)
class SnapshotterConfig:
    """Waits in seconds. ``mounts_wait_s`` must stay below the two minutes of a kubelet.

    ``claim_wait_s`` and ``prepare_wait_s`` together bound a Prepare, which holds up containerd.
    """

    prepare_wait_s: float = 2.0
    mounts_wait_s: float = 110.0
    claim_wait_s: float = 4.0
    release_wait_s: float = 1.0
    close_wait_s: float = 10.0
    trash_delay_s: float = 0.5
    measure_delay_s: float = 1.0
    overlay_options: tuple[str, ...] | None = None


class Snapshotter:
    """Build, ``await start()``, use, ``await close()``; the database is the caller's to close."""

    def __init__(
        self,
        database: Database,
        root: Path,
        lazy: LazyLayers,
        config: SnapshotterConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not root.is_absolute() or set(":,\\") & set(str(root)):
            raise ConfigError(
                f"root {root} cannot be used: it must be absolute, and overlayfs does not take "
                "colons, commas and backslashes in its options"
            )
        self._db = database
        self._lazy = lazy
        self._config = config or SnapshotterConfig()
        self._clock = clock or SystemClock()
        options = self._config.overlay_options
        self._options = overlay.kernel_options() if options is None else options
        self._storage = Storage(root, self._config.trash_delay_s)
        self._measurer = Measurer(database, self._storage, self._config.measure_delay_s)
        self._listing = Listing(database)
        self._creator = Creator(database, self._storage, self._clock)
        self._claims = Claims(lazy, self._config.claim_wait_s)
        self._work = Unbroken()
        self._removals: set[asyncio.Task[None]] = set()
        self._settled = Settled()
        self.damaged: tuple[str, ...] = ()
        """Committed snapshots whose directory was missing at start (after a power loss)."""

    async def start(self) -> None:
        """Repair what a killed process left, then begin to empty the trash."""
        await self._storage.start(await self._db.read(records.last_id))
        self.damaged = tuple(await self._restore_directories())
        await self.cleanup()
        self._work.begin(self._storage.empty_trash())
        self._work.begin(self._measurer.run())

    async def close(self) -> None:
        """Finish what has begun, stop what can go on later. Closing twice does nothing."""
        self._storage.stop()
        self._measurer.stop()
        await self._work.close(self._config.close_wait_s)
        self._storage.close()

    async def prepare(
        self, key: str, parent: str, labels: Mapping[str, str], namespace: str = "default"
    ) -> tuple[Mount, ...]:
        """A new active snapshot. AlreadyExistsError for a layer that is here or is taken lazily.

        Then a committed snapshot has the same label snapshot.ref and the very parent given.
        """
        labels = known.checked(labels)
        chain_id = labels.get(known.SNAPSHOT_REF)
        if chain_id is None:
            return await self._create(Kind.ACTIVE, key, parent, labels)
        below, being_unpacked = self._admit(key, parent, chain_id)
        layer = await self._claims.ask(namespace, chain_id, parent, labels, below, being_unpacked)
        if layer is not None:
            await self._work.finish(self._creator.take(chain_id, parent, labels, layer))
            raise AlreadyExistsError(f"layer {chain_id} is being provided on {parent or 'nothing'}")
        return await self._create(Kind.ACTIVE, key, parent, labels)

    async def view(self, key: str, parent: str, labels: Mapping[str, str]) -> tuple[Mount, ...]:
        """A new read-only snapshot."""
        return await self._create(Kind.VIEW, key, parent, known.checked(labels))

    async def mounts(self, key: str) -> tuple[Mount, ...]:
        """The mounts of an active snapshot or view; waits until lazy layers below are readable."""
        settled = self._settled.get(key)
        if settled is not None:
            return settled
        drops = self._settled.drops
        record, below = self._db.look(lambda c: _with_chain(c, key))
        stack = self._stack(below)
        if _has_lazy(stack):
            await self._lazy.mount(stack, self._config.mounts_wait_s)
        if record.owner_pending and record.parent_id is not None:
            await self._work.finish(self._creator.copy_owner(record.parent_id, record.id))
        found = self._mounts(record.info.kind, record.id, stack)
        if not _has_lazy(stack):
            self._settled.keep(key, found, drops)
        return found

    async def commit(
        self, name: str, key: str, labels: Mapping[str, str], parent: str = ""
    ) -> None:
        """Make an active snapshot the committed ``name``; its labels are replaced.

        Its usage is measured later: containerd holds its metadata locked meanwhile.
        """
        labels = known.checked(labels)
        metastore.check_name(name, "name")
        now_ns = self._clock.wall_ns()

        async def work() -> None:
            snapshot_id = await self._db.write(
                lambda c: metastore.commit(c, name, key, parent, labels, now_ns)
            )
            self._settled.drop(key)
            self._measurer.note(snapshot_id)

        await self._work.finish(work())

    async def remove(self, key: str) -> None:
        """Forget a snapshot. Only NotFoundError and FailedPreconditionError leave this: any other
        would end containerd's whole garbage collection."""
        try:
            await self._work.finish(self._remove(key))
        except (NotFoundError, FailedPreconditionError):
            raise
        except (EmberError, OSError) as error:
            _log.error("cannot remove snapshot %r now: %s", key, error)
            raise FailedPreconditionError(f"cannot remove snapshot {key!r} now: {error}") from error

    async def stat(self, key: str) -> Info:
        """What is known of a snapshot of any kind."""
        return self._db.look(lambda c: records.get(c, key)).info

    async def update(self, name: str, labels: Mapping[str, str], paths: Sequence[str]) -> Info:
        """Change labels by a field mask (none: all labels); returns the new state."""
        labels = known.checked(labels)
        now_ns = self._clock.wall_ns()
        return await self._work.finish(
            self._db.write(lambda c: metastore.update(c, name, labels, paths, now_ns))
        )

    async def walk(self, filters: Sequence[str], block: int = 100) -> AsyncIterator[list[Info]]:
        """All snapshots that match any of ``filters`` (none: all), in blocks; holds no lock."""
        async for infos in self._listing.blocks(filters, block):
            yield infos

    async def usage(self, key: str) -> Usage:
        """What the snapshot alone takes; of a view, which has nothing of its own, nothing."""
        record = self._db.look(lambda c: records.get(c, key))
        if record.layer is not None:
            return await self._lazy.usage(self._entry(_chain_row(record)))
        if record.info.kind is Kind.VIEW:
            return Usage(0, 0)
        if record.info.kind is Kind.COMMITTED and record.usage is not None:
            return record.usage
        usage = await self._storage.measure(record.id)
        if record.info.kind is Kind.COMMITTED:
            await self._db.write(lambda c: metastore.set_usage(c, record.id, usage))
        return usage

    async def cleanup(self) -> None:
        """Throw directories without a row away; safe beside anything else that is going on."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=self._config.release_wait_s)
        unclaimed = await self._storage.unclaimed()
        rows = await self._db.read(records.all_ids)
        await self._storage.discard_orphans(unclaimed, {snapshot_id for snapshot_id, _, _ in rows})

    async def lazy_stacks(self) -> list[tuple[StackEntry, ...]]:
        """Of each lazy layer its chain, itself last; parents come before children."""
        chains = await self._db.read(
            lambda c: [records.chain(c, ident) for ident in records.lazy_ids(c)]
        )
        return [self._stack(rows) for rows in chains]

    # -- creating ---------------------------------------------------------------------------

    def _admit(self, key: str, parent: str, chain_id: str) -> tuple[tuple[StackEntry, ...], bool]:
        """Check a layer's Prepare; AlreadyExistsError if the layer is here on this parent.

        Else what is below it, and whether another client is unpacking it.
        """

        def check(connection: Any) -> tuple[str | None, tuple[ChainRow, ...], bool]:
            parent_id = metastore.check_new(connection, key, parent)
            here = records.find_layer(connection, chain_id, parent_id)
            if here is not None and not self._is_fit(records.get(connection, here)):
                here = None
            busy = records.is_unpacked_now(connection, chain_id)
            return here, records.chain(connection, parent_id), busy

        metastore.check_name(key, "key")
        here, rows, busy = self._db.look(check)
        if here is not None:
            raise AlreadyExistsError(f"layer {chain_id} is here as snapshot {here!r}")
        return self._stack(rows), busy

    def _is_fit(self, record: Record) -> bool:
        if record.layer is None or record.view is None:
            return True
        return self._lazy.is_fit(Digest.parse(record.layer), Digest.parse(record.view))

    async def _create(
        self, kind: Kind, key: str, parent: str, labels: Mapping[str, str]
    ) -> tuple[Mount, ...]:
        metastore.check_name(key, "key")
        rows = self._db.look(lambda c: records.chain(c, metastore.check_new(c, key, parent)))
        stack = self._stack(rows)
        ready = await self._mount_soon(stack, must=known.SNAPSHOT_REF in labels)
        owner_of = stack[-1].snapshot_id if stack and ready else None
        new = NewSnapshot(kind, key, parent, labels, owner_of, owner_pending=not ready)
        drops = self._settled.drops
        snapshot_id, owned = await self._work.finish(self._creator.create(new))
        found = self._mounts(kind, snapshot_id, stack)
        if owned and not _has_lazy(stack):
            self._settled.keep(key, found, drops)
        return found

    async def _mount_soon(self, stack: tuple[StackEntry, ...], must: bool) -> bool:
        """Whether the lazy layers below can be read. Where something is unpacked onto them they
        ``must``: containerd would take owners and modes of missing parents from them. What takes
        longer goes on: Mounts, or who asks next, finds it done."""
        if not _has_lazy(stack):
            return True
        wait_s = self._config.prepare_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._work.finish(self._lazy.mount(stack, wait_s * INDEX_SHARE))
        except TimeoutError:
            if must:
                raise UnavailableError(
                    f"the layers below {stack[-1].name!r} are not mounted yet after {wait_s:g} s;"
                    " ask again"
                ) from None
            return False
        except UnavailableError:
            if must:
                raise
            return False
        return True

    # -- removing ---------------------------------------------------------------------------

    async def _remove(self, key: str) -> None:
        record = await self._db.write(lambda c: metastore.remove(c, key), frees_space=True)
        self._settled.drop(key)
        after = self._work.begin(self._after_removal(record))
        self._removals.add(after)
        after.add_done_callback(self._removals.discard)
        if record.layer is not None:
            await asyncio.wait([after], timeout=self._config.release_wait_s)

    async def _after_removal(self, record: Record) -> None:
        """Clean-up behind the commit: it may fail, and then the next start does it."""
        if record.layer is not None:
            try:
                await self._lazy.release(self._entry(_chain_row(record)))
            except Exception:
                _log.exception("releasing the lazy layer %r failed", record.info.name)
        await self._storage.discard(record.id)

    # -- measuring and repairing ------------------------------------------------------------

    async def _restore_directories(self) -> list[str]:
        """Rows are durable before directories are (a power loss shows it): make the empty ones
        anew; name the committed ones, whose content is lost."""
        present = set(await self._storage.present())
        lost = []
        for snapshot_id, kind, lazy in await self._db.read(records.all_ids):
            if snapshot_id in present:
                continue
            if lazy or kind is not Kind.COMMITTED:
                await self._storage.make(snapshot_id, kind)
                continue
            record = await self._db.read(partial(records.by_id, snapshot_id=snapshot_id))
            if record is not None:
                lost.append(record.info.name)
                await self._db.write(partial(metastore.forget_layer, snapshot_id=snapshot_id))
                _log.error(
                    "content of snapshot %r is lost (no directory %s): remove it and pull again",
                    record.info.name,
                    self._storage.path(snapshot_id),
                )
        return lost

    # -- small things -----------------------------------------------------------------------

    def _mounts(
        self, kind: Kind, snapshot_id: int, stack: Sequence[StackEntry]
    ) -> tuple[Mount, ...]:
        below = [entry.directory for entry in stack]
        return overlay.mounts(kind, self._storage.path(snapshot_id), below, self._options)

    def _stack(self, rows: Sequence[ChainRow]) -> tuple[StackEntry, ...]:
        return tuple(self._entry(row) for row in rows)

    def _entry(self, row: ChainRow) -> StackEntry:
        return StackEntry(
            snapshot_id=row.id,
            name=row.name,
            directory=self._storage.layer(row.id),
            layer=None if row.layer is None else Digest.parse(row.layer),
            chain_id=row.chain_id,
            view=None if row.view is None else Digest.parse(row.view),
        )


def _with_chain(connection: Any, key: str) -> tuple[Record, tuple[ChainRow, ...]]:
    record = records.get_mountable(connection, key)
    return record, records.chain(connection, record.parent_id)


def _chain_row(record: Record) -> ChainRow:
    chain_id = record.info.labels.get(known.SNAPSHOT_REF)
    return ChainRow(record.id, record.info.name, record.layer, record.view, chain_id)


def _has_lazy(stack: Sequence[StackEntry]) -> bool:
    return any(entry.layer is not None for entry in stack)
