"""L1: the views on this node's disk, one sparse file and one presence file each, by digest.

Invariant: one open View per digest; what is removed is first forgotten, on the disk too, and only
when no mount has it open. The caller holds the lock that keeps a second daemon out. It does not
know images, layers or where bytes come from.

    root/views/<hex>      the data, written through this unguarded path
    root/presence/<hex>   the two bitmaps
    root/staging/         whole streams that are not verified yet; emptied at start
    root/ballast          space that gives way to waiting readers
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ioengine.directories import sync_directory
from snapshotter.chunks.bulk import BulkIo
from snapshotter.chunks.datafile import DataFile, DiskError, create_sparse
from snapshotter.chunks.offload import offload
from snapshotter.chunks.presence import Header, Presence, boot_id, read_presence
from snapshotter.chunks.space import Evict, Space, SpaceLimits, evict_nothing, is_full
from snapshotter.chunks.staging import Staging
from snapshotter.chunks.upkeep import Upkeep
from snapshotter.chunks.verify import ChunkDigests
from snapshotter.chunks.view import View, ViewServices
from snapshotter.clock import Clock, SystemClock
from snapshotter.content import CHUNK_BYTES, Digest
from snapshotter.errors import (
    CorruptError,
    FailedPreconditionError,
    RefusedError,
)
from snapshotter.keyed_locks import KeyedLocks
from snapshotter.unbroken import Unbroken

log = logging.getLogger(__name__)

InUse = Callable[[Path], bool]
"""Whether a mount has this data file open; blocks. The proof comes from the kernel."""

CLOSE_WAIT_S = 30.0
_COPY_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """``chunk_bytes`` must be what the indexes have; ``upkeep_s`` is the pace of flushing."""

    root: Path
    chunk_bytes: int = CHUNK_BYTES
    upkeep_s: float = 5.0
    prove_chunks: int = 64
    """How many doubted chunks one turn of the upkeep reads back, per view."""
    workers: int = 4
    space: SpaceLimits = field(default_factory=SpaceLimits)


@dataclass(frozen=True, slots=True)
class StoredView:
    """A view on the disk, open or not. ``allocated_bytes`` is what it takes there."""

    view: Digest
    length_bytes: int
    chunk_count: int
    readable_count: int
    allocated_bytes: int


class ViewStore:
    """The views of one node. Used from the event loop."""

    def __init__(
        self,
        config: StoreConfig,
        bulk: BulkIo,
        *,
        in_use: InUse,
        evict: Evict = evict_nothing,
        clock: Clock | None = None,
        boot: bytes | None = None,
        pool: Executor | None = None,
    ) -> None:
        self.root = config.root
        self.space = Space(config.root, config.space, evict)
        self._config = config
        self._in_use = in_use
        self._clock = clock or SystemClock()
        self._boot = boot if boot is not None else boot_id()
        self._pool = pool or ThreadPoolExecutor(config.workers, "ember-chunks")
        self._services = ViewServices(bulk, self.space, self._pool)
        self._open: dict[Digest, View] = {}
        self._locks = KeyedLocks[Digest]()
        self._work = Unbroken()
        self._upkeep = Upkeep(
            self.views, self.space, self._clock, config.upkeep_s, config.prove_chunks
        )
        self._staged = 0
        self._unsynced: set[Digest] = set()
        """Views whose files were made since the start, and whose names the disk may not have."""

    async def start(self) -> None:
        """Make the directories, drop unfinished streams, fill the ballast, begin the upkeep."""
        await offload(None, self._prepare)
        self._upkeep.start()

    async def close(self) -> None:
        """Flush and close every view in order; no guard uses their bitmaps any more."""
        await self._upkeep.stop()
        await self._work.close(CLOSE_WAIT_S)
        for view in list(self._open):
            await self.release(view)
        await offload(None, self._pool.shutdown)

    def get(self, view: Digest) -> View | None:
        """The view if it is open."""
        return self._open.get(view)

    def views(self) -> list[View]:
        """All open views."""
        return list(self._open.values())

    async def open(self, view: Digest, view_bytes: int, chunk_digest: ChunkDigests) -> View:
        """The view, opened or made; the same object for all until release() or drop().

        NoSpaceError, DiskError: the disk. FailedPreconditionError: it is open with another length.
        """
        found = self._open.get(view)
        if found is None:
            found = await self._work.finish(self._open_once(view, view_bytes, chunk_digest))
        if found.length_bytes != view_bytes:
            raise FailedPreconditionError(
                f"{view} has {found.length_bytes} bytes, not {view_bytes}: one index lies"
            )
        return found

    async def _open_once(self, view: Digest, view_bytes: int, chunk_digest: ChunkDigests) -> View:
        async with self._locked(view):
            found = self._open.get(view)
            if found is None:
                data, presence = await offload(None, self._open_files, view, view_bytes)
                found = self._open[view] = View(data, presence, chunk_digest, self._services)
        return found

    async def release(self, view: Digest) -> None:
        """Flush and close the view if it is open; its bytes stay."""
        await self._work.finish(self._release(view))

    async def _release(self, view: Digest) -> None:
        async with self._locked(view):
            found = self._open.pop(view, None)
            if found is not None:
                await found.close()

    async def drop(self, view: Digest, *, even_if_used: bool = False) -> None:
        """Remove the view's bytes. FailedPreconditionError while a mount has it open, unless it
        goes ``even_if_used``: the mount keeps the file, and nobody else finds it.

        The guard has let go of its bitmap: the view is closed in any case, since the store's own
        descriptors would count as users. Nothing to do if it is not here. Killed at any point it
        leaves either the view or nothing that would be believed.
        """
        await self._work.finish(self._drop(view, even_if_used))

    async def _drop(self, view: Digest, even_if_used: bool) -> None:
        async with self._locked(view):
            found = self._open.pop(view, None)
            if found is not None:
                await found.close(flush=False)
            if not even_if_used and await offload(None, self._is_used, view):
                raise FailedPreconditionError(f"{view} is open in a mount and cannot be removed")
            await offload(None, self._remove, view)

    def stage(self, view: Digest, at_least_bytes: int = 0) -> Staging:
        """A place for a whole stream's plain bytes, whose digest is not known to be right yet.

        NoSpaceError at once if not even ``at_least_bytes`` of it would fit.
        """
        self.space.check(at_least_bytes)
        self._staged += 1
        path = self.root / "staging" / f"{view.hex}.{os.getpid()}.{self._staged}"
        return Staging(view, path, self.space, asyncio.get_running_loop())

    async def seal(self, staging: Staging, view_bytes: int, chunk_digest: ChunkDigests) -> View:
        """The stream was right: what was staged becomes the view, all of it readable and durable.

        If the view is here already it takes over the chunks it lacks, each verified. On an error
        the staging is discarded and nothing became readable through it but verified chunks.
        """
        try:
            if staging.length_bytes != view_bytes:
                raise CorruptError(
                    f"{staging.view}: {staging.length_bytes} bytes were staged, not {view_bytes}"
                )
            async with self._locked(staging.view):
                if staging.view not in self._open and not self._data_path(staging.view).exists():
                    await offload(None, self._adopt, staging, view_bytes)
            view = await self.open(staging.view, view_bytes, chunk_digest)
            if not view.complete:
                await self._take_over(view, staging)
                await view.flush()
            return view
        finally:
            await offload(None, staging.discard)

    async def whole(self, view: Digest) -> bool:
        """Whether every chunk can be read, without opening a view that isn't open."""
        found = self._open.get(view)
        if found is not None:
            return found.whole
        return await offload(None, self._whole, view)

    def _whole(self, view: Digest) -> bool:
        with contextlib.suppress(OSError, RefusedError):
            header, bitmap = read_presence(self._presence_path(view), self._boot)
            return int.from_bytes(bitmap, "little").bit_count() == header.chunk_count
        return False

    async def stored(self) -> list[StoredView]:
        """Everything that is on the disk, open or not."""
        return await offload(None, self._list)

    async def flush(self) -> None:
        """Make durable what is readable, in all views; failures are logged, and tried again."""
        await self._upkeep.turn()

    async def _take_over(self, view: View, staging: Staging) -> None:
        """From the end, so that what was taken over needn't be on the disk twice."""
        size, end = view.chunk_bytes, view.chunk_count
        while end:
            first = max(0, end - _COPY_CHUNKS)
            data = await offload(None, staging.read, first * size, (end - first) * size)
            data = data[: view.length_bytes - first * size]
            parts = [memoryview(data)[at : at + size] for at in range(0, len(data), size)]
            await view.write_run(first, parts, demand=False)
            await offload(None, staging.give_back, first * size)
            end = first

    def _prepare(self) -> None:
        for name in ("views", "presence", "staging"):
            (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in (self.root / "staging").iterdir():
            _unlink(leftover)
        self._remove_halves()
        for name in ("views", "presence"):  # what is here is kept: no open has to see to it
            sync_directory(self.root / name)
        self.space.refill_ballast()

    def _remove_halves(self) -> None:
        """Data without presence and presence without data, left by a kill in open() or drop()."""
        data = {path.name: path for path in (self.root / "views").iterdir()}
        presence = {path.name: path for path in (self.root / "presence").iterdir()}
        for name in presence.keys() - data.keys():
            _unlink(presence[name])
        for name in data.keys() - presence.keys():
            if not data[name].is_file():
                log.error("%s is no view of ours; it stays", data[name])
            elif self._in_use(data[name]):
                log.error("%s is mounted, but what of it is here is not known", data[name])
            else:
                _unlink(data[name])

    def _open_files(self, view: Digest, view_bytes: int) -> tuple[DataFile, Presence]:
        try:
            return self._open_both(view, view_bytes)
        except OSError as error:
            if is_full(error):
                raise self.space.full(error.strerror or "full") from error
            raise DiskError(
                f"view {view} can't be opened: {error}; look at the disk, or move that file away"
            ) from error

    def _open_both(self, view: Digest, view_bytes: int) -> tuple[DataFile, Presence]:
        path, presence_path = self._data_path(view), self._presence_path(view)
        if not (path.exists() and presence_path.exists()):
            self._unsynced.add(view)
        known = create_sparse(path, view_bytes)
        header = Header(view, view_bytes, self._config.chunk_bytes, self._boot, False, False)
        presence = Presence.open(presence_path, header, trusted=known)
        try:
            if view in self._unsynced:
                sync_directory(path.parent)
                sync_directory(presence_path.parent)
                self._unsynced.discard(view)
            return DataFile(path, self.space), presence
        except BaseException:
            presence.close()
            raise

    def _adopt(self, staging: Staging, view_bytes: int) -> None:
        """Rename the staged file into place, then let the presence file say that it is whole."""
        staging.settle(view_bytes)
        path, presence_path = self._data_path(staging.view), self._presence_path(staging.view)
        presence_path.unlink(missing_ok=True)
        sync_directory(presence_path.parent)
        staging.path.rename(path)
        sync_directory(path.parent)
        header = Header(
            staging.view, view_bytes, self._config.chunk_bytes, self._boot, False, False
        )
        presence = Presence.open(presence_path, header, trusted=False)
        try:
            presence.write_durable(_all_set(header))
            presence.readable.set(0, header.chunk_count)
            sync_directory(presence_path.parent)
        finally:
            presence.close()

    def _is_used(self, view: Digest) -> bool:
        path = self._data_path(view)
        return path.exists() and self._in_use(path)

    def _remove(self, view: Digest) -> None:
        """The presence goes first, so that bytes which stay behind are nobody's."""
        self._presence_path(view).unlink(missing_ok=True)
        sync_directory(self.root / "presence")
        self._data_path(view).unlink(missing_ok=True)
        sync_directory(self.root / "views")

    def _list(self) -> list[StoredView]:
        found = []
        for path in sorted((self.root / "presence").iterdir()):
            with contextlib.suppress(OSError, RefusedError):  # whoever opens it says what it is
                header, bitmap = read_presence(path, self._boot)
                status = self._data_path(header.view).stat()
                found.append(
                    StoredView(
                        header.view,
                        header.view_bytes,
                        header.chunk_count,
                        int.from_bytes(bitmap, "little").bit_count(),
                        status.st_blocks * 512,
                    )
                )
        return found

    def _data_path(self, view: Digest) -> Path:
        return self.root / "views" / view.hex

    def _presence_path(self, view: Digest) -> Path:
        return self.root / "presence" / view.hex

    def _locked(self, view: Digest) -> AbstractAsyncContextManager[None]:
        """One opener, closer or remover of a view at a time."""
        return self._locks.hold(view)


def _all_set(header: Header) -> bytes:
    return ((1 << header.chunk_count) - 1).to_bytes(header.bitmap_bytes, "little")


def _unlink(leftover: Path) -> None:
    """What is not a file of ours, or can't go, is named and stays: it stands in nobody's way."""
    try:
        leftover.unlink()
    except OSError as error:
        log.error("%s is not removed: %s", leftover, error)
