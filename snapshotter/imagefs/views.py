"""Views as this package needs them: opened by their index, guarded while something may be missing.

The guard is told of a view before it is mounted through the marked path; when the last chunk is
here an ignore mark ends its events. An inode that the guard does not know (a container outlived
the record of its layer) is looked up on disk, so that its reader is served and not failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path

from ioengine import mounts
from ioengine.guard import Guard
from snapshotter.chunks.staging import Staging
from snapshotter.chunks.store import ViewStore
from snapshotter.chunks.view import View
from snapshotter.content import Digest
from snapshotter.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from snapshotter.fetch import Road
from snapshotter.image.index import LayerIndex
from snapshotter.keyed_locks import KeyedLocks

log = logging.getLogger(__name__)

_ALGORITHMS = {64: "sha256", 128: "sha512"}
"""By the hex digits of a view file's name."""


def _view_of(name: str) -> Digest:
    """The view whose file is called ``name``."""
    return Digest(_ALGORITHMS.get(len(name), "sha256"), name)


def _nobody() -> None:
    """Nobody wants to know."""


class StagedView:
    """A view that is being written whole (ingest.Staging over the chunk store)."""

    def __init__(
        self, store: ViewStore, staging: Staging, sealed: Callable[[Digest], Awaitable[None]]
    ) -> None:
        self._store = store
        self._staging = staging
        self._sealed = sealed
        self.sink = staging.sink

    async def seal(self, index: LayerIndex) -> None:
        """All of it becomes readable; the view stays open only if it is mounted."""
        await self._store.seal(self._staging, index.view_bytes, index.chunk_digest)
        await self._sealed(index.diff_id)

    async def discard(self) -> None:
        """Throw away what was written; twice is fine."""
        await asyncio.to_thread(self._staging.discard)


class Views:
    """The views that are open, by digest and by inode."""

    def __init__(
        self,
        store: ViewStore,
        road: Road,
        guard: Guard | None,
        unmarked: Path,
        marked: Path,
        find_index: Callable[[Digest], LayerIndex | None],
    ) -> None:
        self._store = store
        self._road = road
        self._guard = guard
        self._unmarked = unmarked
        self._marked = marked
        self._find_index = find_index
        self.when_complete: Callable[[], object] = _nobody
        self._inodes: dict[int, Digest] = {}
        self._guarded: dict[Digest, View] = {}
        self._kept: Counter[Digest] = Counter()
        self._locks: KeyedLocks[Digest] = KeyedLocks()

    def path(self, view: Digest, *, guarded: bool) -> Path:
        """The view's file, through the marked mount or past it."""
        return (self._marked if guarded else self._unmarked) / view.hex

    async def open(self, index: LayerIndex) -> View:
        """The view of ``index``; its sparse file has its final length from now on."""
        return await self._store.open(index.diff_id, index.view_bytes, index.chunk_digest)

    async def complete(self, index: LayerIndex) -> bool:
        """Whether every chunk of the view is here, durable and not in doubt; opens the view."""
        return (await self.open(index)).complete

    async def whole(self, view: Digest) -> bool:
        """Whether every chunk of the view can be read; opens nothing."""
        return await self._store.whole(view)

    async def guard(self, index: LayerIndex) -> None:
        """Let the guard answer for the view; before it is mounted through the marked path.

        UnavailableError where there is no guard and the view is not complete.
        """
        async with self._locks.hold(index.diff_id):
            await self._guard_held(index)

    async def _guard_held(self, index: LayerIndex) -> None:
        view = await self.open(index)
        if self._guard is None and not view.complete:
            raise UnavailableError(
                f"view {view.digest} is not complete, and there is no lazy data path to fill it"
                " by: `ember doctor` says what is missing; else remove its image and pull it again"
            )
        if self._guard is None or self._guarded.get(view.digest) is view:
            return
        self._guard.unignore(view.path)
        self._register(view)
        view.when_complete(lambda: self._completed(view))

    async def let_go(self, view: Digest) -> None:
        """Nothing of ours shows the view any more: close it, and fetch no more of it.

        A container may have outlived the mount; its first event has the view guarded again.
        """
        async with self._locks.hold(view):
            await self._close(view)

    async def _close(self, view: Digest) -> None:
        self._forget(view)
        await self._road.stop(view)
        await self._store.release(view)
        await self._road.stop(view)  # what was asked for while it was being closed

    async def let_go_of_all_but(self, wanted: Collection[Digest]) -> None:
        """As let_go, of every view that is guarded and not ``wanted``."""
        for view in [view for view in self._guarded if view not in wanted]:
            try:
                await self.let_go(view)
            except Exception:
                log.exception("letting go of view %s failed; tried again later", view)

    def _forget(self, view: Digest) -> bool:
        """Have the guard let go of the view's bitmap; whether it had it."""
        known = self._guarded.pop(view, None)
        if known is None:
            return False
        if self._guard is not None:
            self._guard.unregister(known.inode)
        self._inodes.pop(known.inode, None)
        return True

    def _register(self, view: View) -> None:
        assert self._guard is not None
        self._guard.register(
            view.inode,
            view.readable_bitmap,
            chunk_bytes=view.chunk_bytes,
            length_bytes=view.length_bytes,
        )
        self._inodes[view.inode] = view.digest
        self._guarded[view.digest] = view

    def _completed(self, view: View) -> None:
        self.when_complete()
        if self._guard is None or self._store.get(view.digest) is not view:
            return
        try:
            self._guard.ignore(view.path)
        except OSError as error:
            log.warning("view %s is complete, but its events go on: %s", view.digest, error)
        else:
            log.info("view %s is complete; reads of it cost no events any more", view.digest)

    async def stage(self, view: Digest, at_least_bytes: int) -> StagedView:
        """A place for a whole stream of plain bytes; what can go goes first, if need be."""
        await self._store.space.have_room(at_least_bytes)
        staging = self._store.stage(view, at_least_bytes)
        return StagedView(self._store, staging, self._close_unless_guarded)

    async def _close_unless_guarded(self, view: Digest) -> None:
        async with self._locks.hold(view):
            if view not in self._guarded and not self._kept[view]:
                await self._close(view)

    @contextlib.asynccontextmanager
    async def keep(self, view: Digest) -> AsyncIterator[None]:
        """For a block's length the view is neither evicted nor, for want of a mount, closed."""
        self._kept[view] += 1
        try:
            yield
        finally:
            self._kept[view] -= 1
            if not self._kept[view]:
                del self._kept[view]
                await self._close_unless_guarded(view)

    async def by_inode(self, inode: int) -> Digest | None:
        """Whose file the inode is; looked up on disk if the guard was never told of it."""
        found = self._inodes.get(inode)
        if found is not None:
            return found
        name = await asyncio.to_thread(self._name_of, inode)
        if name is None:
            return None
        view = _view_of(name)
        with contextlib.suppress(NotFoundError):
            await self.guard(self._index(view))
            return view
        return None

    def _name_of(self, inode: int) -> str | None:
        for path in self._unmarked.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    return path.name
        return None

    def _index(self, view: Digest) -> LayerIndex:
        index = self._find_index(view)
        if index is None:
            raise NotFoundError(f"no index is here for view {view}")
        return index

    async def length(self, view: Digest) -> int:
        """Plain bytes of the view."""
        opened = self._store.get(view) or await self.open(self._index(view))
        return opened.length_bytes

    def incomplete(self) -> Sequence[Digest]:
        """The guarded views that lack something."""
        return [digest for digest, view in self._guarded.items() if not view.complete]

    async def perhaps_read(self) -> list[Digest]:
        """The incomplete views that somebody may be reading, known to the guard or not.

        A container may have outlived the record of its mount, or the index that it was made from.
        """
        found = dict.fromkeys(self.incomplete())
        for view in await asyncio.to_thread(self._open_elsewhere):
            if not await self.whole(view):
                found[view] = None
        return list(found)

    def _open_elsewhere(self) -> list[Digest]:
        """The views that a mount has open, as the kernel says, and the store has not."""
        found = []
        for path in self._unmarked.iterdir():
            with contextlib.suppress(OSError, InvalidArgumentError):
                view = _view_of(path.name)
                if self._store.get(view) is None and mounts.view_is_open(path):
                    found.append(view)
        return found

    def is_busy(self, view: Digest) -> bool:
        """Whether the view is guarded or kept, or something of it is being fetched."""
        return view in self._guarded or view in self._kept or self._road.is_working(view)

    def here_bytes(self, view: Digest) -> int | None:
        """Plain bytes of the view that can be read; None if it is not open."""
        opened = self._store.get(view)
        if opened is None:
            return None
        return min(opened.length_bytes, opened.readable_count * opened.chunk_bytes)

    def bytes_on_disk(self, view: Digest) -> int:
        """Allocated bytes of the view's file."""
        try:
            return self.path(view, guarded=False).stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    async def drop(self, view: Digest) -> int:
        """Remove the view's bytes; how many that freed.

        FailedPreconditionError while an EROFS instance has it open: then nothing has changed.
        """
        async with self._locks.hold(view):
            freed = self.bytes_on_disk(view)
            guarded = self._forget(view)
            await self._road.stop(view)
            try:
                await self._store.drop(view)
            except FailedPreconditionError:
                if guarded:
                    await self._guard_held(self._index(view))
                raise
            await self._road.stop(view)
        return freed

    async def disown(self, view: Digest) -> None:
        """The view's bytes are wrong: whoever has them open keeps them, and nobody gets them more.

        What an instance asks for after that fails, as of a file that nobody knows.
        """
        async with self._locks.hold(view):
            self._forget(view)
            await self._road.stop(view)
            await self._store.drop(view, even_if_used=True)
            await self._road.stop(view)

    async def close(self) -> None:
        """Let the guard forget every view, so that the store can close them."""
        if self._guard is not None:
            for inode in self._inodes:
                self._guard.unregister(inode)
        self._inodes.clear()
        self._guarded.clear()
