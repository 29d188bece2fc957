"""Views as this package needs them: opened by their index, guarded while something may be missing.

The guard is told of a view before it is mounted through the marked path; when the last chunk is
here an ignore mark ends its events. An inode that the guard does not know (a container outlived
the record of its layer) is looked up on disk, so that its reader is served and not failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
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

log = logging.getLogger(__name__)

_ALGORITHMS = {64: "sha256", 128: "sha512"}
"""By the hex digits of a view file's name."""


class StagedView:
    """A view that is being written whole (ingest.Staging over the chunk store)."""

    def __init__(self, store: ViewStore, staging: Staging) -> None:
        self._store = store
        self._staging = staging
        self.sink = staging.sink

    async def seal(self, index: LayerIndex) -> None:
        """All of it becomes readable."""
        await self._store.seal(self._staging, index.view_bytes, index.chunk_digest)

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
        self._inodes: dict[int, Digest] = {}
        self._guarded: set[Digest] = set()

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
        view = await self.open(index)
        while self._store.get(view.digest) is not view:  # let go of in between
            view = await self.open(index)
        if self._guard is None and not view.complete:
            raise UnavailableError(
                f"view {view.digest} is not complete, and there is no lazy data path to fill it"
                " by: `ember doctor` says what is missing; else remove its image and pull it again"
            )
        if self._guard is None or view.digest in self._guarded:
            return
        self._guard.unignore(view.path)
        self._register(view)
        view.when_complete(lambda: self._completed(view))

    async def let_go(self, view: Digest) -> None:
        """Nothing of ours shows the view any more: close it, and fetch no more of it.

        A container may have outlived the mount; its first event has the view guarded again.
        """
        opened = self._store.get(view)
        if opened is not None and view in self._guarded:
            self._forget(opened)
        await self._road.stop(view)
        await self._store.release(view)

    def _forget(self, view: View) -> None:
        if self._guard is not None:
            self._guard.unregister(view.inode)
        self._guarded.discard(view.digest)
        self._inodes.pop(view.inode, None)

    def _register(self, view: View) -> None:
        assert self._guard is not None
        self._guard.register(
            view.inode,
            view.readable_bitmap,
            chunk_bytes=view.chunk_bytes,
            length_bytes=view.length_bytes,
        )
        self._inodes[view.inode] = view.digest
        self._guarded.add(view.digest)

    def _completed(self, view: View) -> None:
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
        return StagedView(self._store, self._store.stage(view, at_least_bytes))

    async def by_inode(self, inode: int) -> Digest | None:
        """Whose file the inode is; looked up on disk if the guard was never told of it."""
        found = self._inodes.get(inode)
        if found is not None:
            return found
        name = await asyncio.to_thread(self._name_of, inode)
        if name is None:
            return None
        view = Digest(_ALGORITHMS.get(len(name), "sha256"), name)
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
        views = (self._store.get(digest) for digest in self._guarded)
        return [view.digest for view in views if view is not None and not view.complete]

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
                view = Digest(_ALGORITHMS.get(len(path.name), "sha256"), path.name)
                if self._store.get(view) is None and mounts.view_is_open(path):
                    found.append(view)
        return found

    def is_open(self, view: Digest) -> bool:
        """Whether the view is mounted, or being fetched or completed."""
        return self._store.get(view) is not None

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
        freed = self.bytes_on_disk(view)
        opened = self._store.get(view)
        guarded = view in self._guarded and opened is not None
        if opened is not None and guarded:
            self._forget(opened)
        await self._road.stop(view)
        try:
            await self._store.drop(view)
        except FailedPreconditionError:
            if guarded:
                await self.guard(self._index(view))
            raise
        return freed

    async def close(self) -> None:
        """Let the guard forget every view, so that the store can close them."""
        if self._guard is not None:
            for inode in self._inodes:
                self._guard.unregister(inode)
        self._inodes.clear()
        self._guarded.clear()
