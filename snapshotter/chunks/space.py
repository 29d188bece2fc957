"""Room on the cache's file system: reserve before writing, and never hang when it is full.

When a reservation fails, first something else is evicted (the caller's hook); for a chunk that a
reader waits for, the ballast gives way next: a preallocated file that exists to be shortened. When
that is gone too, NoSpaceError. Background writes never take the last ``keep_free_bytes``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import NoSpaceError

log = logging.getLogger(__name__)

MIB = 1024 * 1024
BALLAST = "ballast"
_FULL = (errno.ENOSPC, errno.EDQUOT)

QUIET_S = 60.0
"""A disk that stays full is said so once in so long; each read that fails has its own line."""

BARREN_S = 1.0
"""Where nothing could be evicted just now, nobody looks again for so long."""

Evict = Callable[[int], Awaitable[int]]
"""Free at least so many bytes, if possible; answers how many became free."""


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """``ballast_bytes`` wait for bad days; background writes leave ``keep_free_bytes`` alone."""

    ballast_bytes: int = 64 * MIB
    keep_free_bytes: int = 256 * MIB
    release_bytes: int = 4 * MIB
    """How much of the ballast goes at a time."""
    evict_timeout_s: float = 20.0


async def evict_nothing(length_bytes: int) -> int:
    """The hook of a cache that has nothing it could do without."""
    del length_bytes
    return 0


def is_full(error: OSError) -> bool:
    """Whether the error says that the file system or a quota is full."""
    return error.errno in _FULL


class Space:
    """What is left of one file system. Methods that are not coroutines block on the disk."""

    def __init__(self, root: Path, limits: SpaceLimits, evict: Evict = evict_nothing) -> None:
        self._root = root
        self._ballast = root / BALLAST
        self._limits = limits
        self._evict = evict
        self._evicting: asyncio.Task[int] | None = None
        self._releasing: asyncio.Task[int] | None = None
        self._ballast_lock = threading.Lock()
        self._complained_s = -QUIET_S
        self._barren_until_s = 0.0

    def evict_with(self, evict: Evict) -> None:
        """Ask ``evict`` for room from now on."""
        self._evict = evict

    def reserve(self, fd: int, offset: int, length: int, *, demand: bool) -> None:
        """Allocate [offset, offset + length) of ``fd``; NoSpaceError names the file system.

        Background work (``demand`` false) is refused too when it would leave too little for others.
        """
        if not demand:
            self.check(length)
        try:
            os.posix_fallocate(fd, offset, length)
        except OSError as error:
            if is_full(error):
                raise self.full(error.strerror or "full") from error
            raise

    def check(self, length: int) -> None:
        """NoSpaceError if background work that takes ``length`` bytes leaves too little free."""
        free, kept = self.free_bytes(), self._limits.keep_free_bytes
        if free < kept + length:
            raise self.full(f"{length} bytes of {free} would leave less than {kept} free")

    def full(self, why: str) -> NoSpaceError:
        """The error for a file system without room."""
        return NoSpaceError(
            f"no space for chunks under {self._root}: {why}; "
            "free some, or remove images with `ember rm --data`"
        )

    def complain(self, text: str) -> None:
        """Say loudly that a write found no room, unless that was said just now."""
        now_s = time.monotonic()
        if now_s - self._complained_s >= QUIET_S:
            self._complained_s = now_s
            log.error("%s", text)

    def free_bytes(self) -> int:
        """Bytes that an unprivileged writer could still have (statvfs(3), f_bavail)."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    async def have_room(self, length: int) -> None:
        """Evict as much as background work of ``length`` bytes needs; it may still not fit."""
        if self._limits.keep_free_bytes + length > self.free_bytes():
            await self._evict_once(length)

    async def make_room(self, length: int, *, demand: bool) -> bool:
        """Evict, and for a waiting reader shorten the ballast; False: nothing more can go."""
        if await self._evict_once(length) > 0:
            return True
        return demand and await self._release_once(length) > 0

    def make_room_from_thread(self, loop: asyncio.AbstractEventLoop, length: int) -> bool:
        """make_room() without the ballast, for a worker thread; blocks, never on the loop's."""
        asked = asyncio.run_coroutine_threadsafe(self.make_room(length, demand=False), loop)
        try:
            return asked.result(self._limits.evict_timeout_s + 5)
        except (TimeoutError, concurrent.futures.CancelledError):
            return False

    def release_ballast(self, length: int) -> int:
        """Shorten the ballast by ``length`` or more; how many bytes that freed, 0 if it is gone."""
        with self._ballast_lock:
            held = self._ballast_bytes()
            freed = min(held, max(length, self._limits.release_bytes))
            if freed == 0:
                return 0
            with self._ballast.open("r+b") as file:
                file.truncate(held - freed)
        log.error(
            "%s is full: %d bytes of ballast released for waiting readers, %d left",
            self._root,
            freed,
            held - freed,
        )
        return freed

    def refill_ballast(self) -> int:
        """Grow the ballast back while that leaves enough free; its size now, in bytes."""
        with self._ballast_lock:  # not over the sync: a reader may wait for this ballast
            grown = self._grow_ballast()
        if grown:
            with self._ballast.open("rb") as file:
                os.fsync(file.fileno())
        return self._ballast_bytes()

    def _grow_ballast(self) -> bool:
        held, wanted = self._ballast_bytes(), self._limits.ballast_bytes
        spare = self.free_bytes() - self._limits.keep_free_bytes
        if held >= wanted or spare < wanted - held:
            return False
        fd = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, wanted)
        except OSError as error:
            if not is_full(error):
                raise
            os.ftruncate(fd, held)
            return False
        finally:
            os.close(fd)
        return True

    def _ballast_bytes(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._ballast.stat().st_size
        return 0

    async def _evict_once(self, length: int) -> int:
        """One eviction at a time; whoever asks meanwhile waits for that one."""
        if self._evicting is None:
            if time.monotonic() < self._barren_until_s:
                return 0
            lacking = self._limits.keep_free_bytes + length - self.free_bytes()
            self._evicting = asyncio.create_task(self._run_evict(max(length, lacking)))
        return await asyncio.shield(self._evicting)

    async def _release_once(self, length: int) -> int:
        """One step of the ballast for all who find the disk full at once."""
        if self._releasing is None or self._releasing.done():
            release = asyncio.to_thread(self.release_ballast, length)
            self._releasing = asyncio.create_task(release)
        return await asyncio.shield(self._releasing)

    async def _run_evict(self, length: int) -> int:
        try:
            async with asyncio.timeout(self._limits.evict_timeout_s):
                freed = await self._evict(length)
                if not freed:
                    self._barren_until_s = time.monotonic() + BARREN_S
                return freed
        except TimeoutError:
            log.warning("evicting from %s took too long, going on without", self._root)
            return 0
        except Exception:
            log.exception("evicting from %s failed, going on without", self._root)
            return 0
        finally:
            self._evicting = None
