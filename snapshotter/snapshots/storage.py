"""The disk side of snapshots for asyncio: directories, measuring, and the trash in the background.

What is awaited doesn't block the loop (``make_now`` is for other threads), and each kind of work
has threads of its own: a walk over a big layer, or its deletion, must not keep a Prepare waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from snapshotter.errors import NotFoundError
from snapshotter.snapshots.directories import Directories
from snapshotter.snapshots.model import Kind, Usage
from snapshotter.snapshots.trash import Trash
from snapshotter.snapshots.usage import measure

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Storage:
    """Directories by snapshot id below ``root``."""

    def __init__(self, root: Path, trash_delay_s: float = 0.0) -> None:
        self._directories = Directories(root)
        self._trash = Trash(self._directories.trash)
        self._files = ThreadPoolExecutor(4, thread_name_prefix="ember-snapshot-files")
        self._walks = ThreadPoolExecutor(2, thread_name_prefix="ember-snapshot-usage")
        self._deleting = ThreadPoolExecutor(1, thread_name_prefix="ember-snapshot-trash")
        self._discarded = asyncio.Event()
        self._stopping = asyncio.Event()
        self._trash_delay_s = trash_delay_s
        self.path = self._directories.path
        self.layer = self._directories.layer
        self.reserve = self._directories.reserve
        self.settled = self._directories.settled
        self.make_now = self._directories.make

    async def start(self, last_id: int) -> None:
        """Make the folders; ``last_id`` is the highest id that ever had a row."""
        await self._run(self._directories.start, last_id)

    def stop(self) -> None:
        """Interrupt the emptying of the trash; the next start goes on with it."""
        self._trash.stop()
        self._stopping.set()
        self._discarded.set()

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._files, self._walks, self._deleting):
            pool.shutdown(wait=False)

    async def present(self) -> list[int]:
        """The ids that have a directory."""
        return await self._run(self._directories.present)

    async def make(self, snapshot_id: int, kind: Kind, owner_of: int | None = None) -> bool:
        """Make the directory of a new snapshot; whether it is owned as the root of ``owner_of``."""
        return await self._run(self._directories.make, snapshot_id, kind, owner_of)

    async def copy_owner(self, parent_id: int, snapshot_id: int) -> bool:
        """Give the root of a new snapshot the owner of its parent's root, if that is here."""
        return await self._run(self._directories.copy_owner, parent_id, snapshot_id)

    async def discard(self, snapshot_id: int) -> None:
        """Throw a directory away; a failure is logged and made good at the next start."""
        try:
            await self._run(self._directories.discard, snapshot_id)
        except OSError as error:
            _log.warning("directory of snapshot %d stays for now: %s", snapshot_id, error)
        self._discarded.set()

    async def unclaimed(self) -> list[int]:
        """The ids with a directory that nobody is making; read the rows after this."""
        return await self._run(self._directories.unclaimed)

    async def discard_orphans(self, unclaimed: list[int], known: Container[int]) -> None:
        """Throw away which of ``unclaimed`` has no row; ``known`` was read after them."""
        for orphan in (ident for ident in unclaimed if ident not in known):
            _log.info("directory of snapshot %d has no row: thrown away", orphan)
            await self.discard(orphan)
        self._discarded.set()

    async def measure(self, snapshot_id: int) -> Usage:
        """What the snapshot's own files take; NotFoundError if they are gone."""
        layer = self.layer(snapshot_id)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._walks, measure, layer)
        except FileNotFoundError:
            raise NotFoundError(f"directory {layer} is gone: the snapshot was removed") from None

    async def empty_trash(self) -> None:
        """Delete what is thrown away, until ``stop``; a little later, in one go with what follows:
        containerd removes many in a row, holding its locks."""
        loop = asyncio.get_running_loop()
        while True:
            await self._discarded.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._trash_delay_s):
                    await self._stopping.wait()
            self._discarded.clear()
            if self._stopping.is_set():
                return
            try:
                await loop.run_in_executor(self._deleting, self._trash.empty)
            except OSError as error:
                _log.warning("cannot empty %s: %s", self._directories.trash, error)

    async def _run(self, call: Callable[P, T], *values: P.args, **_: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._files, call, *values)
