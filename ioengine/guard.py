"""The fanotify guard: reads of absent chunks wait in the kernel until this process answers.

The C thread (csrc/guard_thread.c) answers what is readable without the GIL; the rest comes out of
``misses()``. Group and journal are held by the keeper too, so they outlive this process.
Invariant: the group is never marked before the keeper holds it, and never read while a new event
could get the number of one that a predecessor left behind. This module must not know a digest or a
file's name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ioengine import mounts
from ioengine._native import ffi, lib
from ioengine.errors import check
from ioengine.keeper import Keeper

JOURNAL_SLOTS = 65_536
RESERVED_DESCRIPTORS = 512
"""Descriptors under RLIMIT_NOFILE that waiting events leave to the rest of the process."""
GROUP_NAME = "guard-group"
JOURNAL_NAME = "guard-journal"
_BATCH = 256
_AHEADS = 64
_PREDECESSOR_S = 10.0


@dataclass(frozen=True, slots=True)
class Miss:
    """A read that waits: bytes [offset, offset + length) of the view file ``inode``.

    ``known`` says whether the inode is registered; of an unknown one the range is cut at the
    file's size, and inode 0 is a file outside the guarded file system. ``pid`` is the reader.
    ``ahead``: so many bytes behind it this reader will come to, as it reads in order (0: it does
    not). ``again``: how many of those who begin to read somewhere in this view read on, of 255.
    """

    token: int
    inode: int
    offset: int
    length: int
    pid: int
    known: bool
    ahead: int = 0
    again: int = 128


@dataclass(frozen=True, slots=True)
class Ahead:
    """Bytes of the view file ``inode`` that a reader in order will come to; some are missing."""

    inode: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """An event that a predecessor took and did not answer before it died.

    ``inode`` is None if it died before it noted the file: then the range may be of any view.
    ``length`` is None if the kernel named no range: then it is the whole file. ``reserved``: no
    new event can get its number; one that isn't must be settled before ``start()``.
    """

    entry: int
    inode: int | None
    offset: int
    length: int | None
    pid: int
    reserved: bool = False


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """Events since ``start()``; the words are those of csrc/ember_io.h."""

    events: int
    allowed: int
    misses: int
    denied: int
    read_errors: int
    pauses: int
    outstanding: int
    orphans: int
    last_error: int
    locked: bool


class Guard:
    """One fanotify group over one private bind mount. Thread-safe but for open, start and close."""

    def __init__(self, native: Any, group: int, journal: int, *, adopted: bool) -> None:
        self.adopted = adopted
        """True if the group outlived a predecessor; False means it is new, and that whatever was
        mounted through the marked path before has been without a guard."""
        self._native = native
        self._group = group
        self._journal = journal
        self._bitmaps: dict[int, Any] = {}
        self._batch = ffi.new("ember_miss[]", _BATCH)
        self._aheads = ffi.new("ember_ahead[]", _AHEADS)
        self.orphans = self._find_orphans()

    @classmethod
    def open(
        cls,
        keeper: Keeper,
        marked_path: Path,
        *,
        stored: Mapping[str, int] | None = None,
        slots: int = JOURNAL_SLOTS,
        reserve: int = RESERVED_DESCRIPTORS,
        predecessor_s: float = _PREDECESSOR_S,
    ) -> Guard:
        """Adopt the group that ``keeper`` (or else ``stored``, by name) holds, or make a new one.

        ``marked_path`` must be a mount point made by ``mounts.bind_private``; it is marked, which
        is harmless when it is already. ``stored``: descriptors from a service manager's store;
        they stay the caller's. Waits up to ``predecessor_s`` seconds for a dying predecessor.
        Raises OSError: EBUSY while another process works with the journal, EINVAL if the path is
        no mount point, EOPNOTSUPP if its file system knows no pre-content events, EPERM.
        """
        if not mounts.is_mounted(marked_path) or not marked_path.name:
            text = f"{marked_path} is no private mount: a mark would cover all that is around it"
            raise OSError(errno.EINVAL, text)
        device = marked_path.stat().st_dev
        pair = _held_pair(keeper, stored or {})
        adopted = pair is not None
        group, journal = pair if pair is not None else _new_pair(slots)
        try:
            native = _join(group, journal, device, reserve, predecessor_s)
        except BaseException:
            os.close(group)
            os.close(journal)
            raise
        guard = cls(native, group, journal, adopted=adopted)
        try:
            guard.entrust(keeper)
            check(
                lib.ember_guard_mark(group, os.fsencode(marked_path)),
                f"cannot watch {marked_path} with fanotify",
            )
        except BaseException:
            guard.close()
            raise
        return guard

    def entrust(self, keeper: Keeper) -> None:
        """Have ``keeper`` hold group and journal too: at the start, and after a keeper's death."""
        keeper.put(self.descriptors())

    def descriptors(self) -> dict[str, int]:
        """Group and journal by the names under which they are stored; they stay the guard's."""
        return {JOURNAL_NAME: self._journal, GROUP_NAME: self._group}

    def settle(self, orphan: Orphan, error: int = 0) -> None:
        """Answer an orphan: let its reader go on (its range must be filled), or fail it.

        ``error`` is one that fanotify knows (EIO, EAGAIN, ENOSPC, EBUSY, EPERM).
        """
        check(lib.ember_guard_settle(self._ptr(), orphan.entry, error), f"cannot settle {orphan}")
        self.orphans = [other for other in self.orphans if other != orphan]

    def start(self) -> None:
        """Begin to take events; OSError (EBUSY) while an unreserved orphan is not settled."""
        check(lib.ember_guard_start(self._ptr()), "cannot start the guard's thread")

    def stop(self) -> None:
        """Take no more events. Readers go on waiting; misses can still be answered."""
        check(lib.ember_guard_stop(self._ptr()), "cannot stop the guard's thread")

    def close(self) -> None:
        """Stop and leave the group. What is unanswered becomes the successor's orphan."""
        if self._native is None:
            return
        lib.ember_guard_close(self._native)
        self._native = None
        os.close(self._group)
        os.close(self._journal)
        self._bitmaps.clear()

    def fileno(self) -> int:
        """An eventfd that is readable while ``misses()`` or ``aheads()`` has something to give."""
        return int(lib.ember_guard_eventfd(self._ptr()))

    def misses(self) -> list[Miss]:
        """The misses that came since the last call, up to 256 (then ``fileno`` stays readable).

        Each must be answered once, by ``allow`` or ``deny``; until then its reader waits.
        """
        count = lib.ember_guard_misses(self._ptr(), self._batch, _BATCH)
        return [
            Miss(m.token, m.inode, m.offset, m.length, m.pid, bool(m.known), m.ahead, m.again)
            for m in (self._batch[i] for i in range(count))
        ]

    def read_ahead(self, most_bytes: int) -> None:
        """Tell of at most so many bytes ahead of a reader; 0, as it begins: of none."""
        lib.ember_guard_read_ahead(self._ptr(), most_bytes)

    def aheads(self) -> list[Ahead]:
        """What readers in order will miss soon, as seen since the last call; nobody waits yet."""
        count = lib.ember_guard_aheads(self._ptr(), self._aheads, _AHEADS)
        return [Ahead(a.inode, a.offset, a.length) for a in (self._aheads[i] for i in range(count))]

    def allow(self, miss: Miss) -> None:
        """Let the reader go on: the range must be in the view file by now."""
        self._answer(miss, 0)

    def deny(self, miss: Miss, error: int = errno.EIO) -> None:
        """Fail the read (EROFS shows EIO, whatever ``error``); the next one asks again."""
        if not 0 < error < 256:
            raise ValueError(f"not an errno to deny with: {error}")
        self._answer(miss, error)

    def _answer(self, miss: Miss, error: int) -> None:
        check(lib.ember_guard_answer(self._ptr(), miss.token, error), f"cannot answer {miss}")

    def register(self, inode: int, bitmap: Any, *, chunk_bytes: int, length_bytes: int) -> None:
        """Let the thread answer for a view by itself, as far as its chunks are readable.

        ``bitmap``: a buffer (such as an mmap) whose bit n % 8 of byte n // 8 is chunk n. It is
        kept, exported, until ``unregister``. A registered inode is replaced.
        """
        kept = ffi.from_buffer("uint8_t[]", bitmap)
        check(
            lib.ember_guard_add(self._ptr(), inode, kept, len(kept), chunk_bytes, length_bytes),
            f"cannot register view file {inode} ({length_bytes} bytes, bitmap of {len(kept)})",
        )
        before = self._bitmaps.pop(inode, None)
        self._bitmaps[inode] = kept
        _release(before)

    def unregister(self, inode: int) -> None:
        """Forget a view; on return nobody looks at its bitmap. Unknown inodes are passed over."""
        result = lib.ember_guard_remove(self._ptr(), inode)
        if result != -errno.ENOENT:
            check(result, f"cannot unregister view file {inode}")
        _release(self._bitmaps.pop(inode, None))

    def ignore(self, path: Path) -> None:
        """End the events of a file (its view is complete), also where it is mounted already.

        ``path`` must not lead through the marked mount. The mark outlives this process.
        """
        self._mark(path, on=True)

    def unignore(self, path: Path) -> None:
        """Bring the events of a file back; harmless where it was not ignored."""
        with contextlib.suppress(FileNotFoundError):
            self._mark(path, on=False)

    def _mark(self, path: Path, *, on: bool) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            result = lib.ember_guard_ignore(self._ptr(), descriptor, int(on))
            check(result, f"cannot {'set' if on else 'remove'} the ignore mark of {path}")
        finally:
            os.close(descriptor)

    def counts(self) -> GuardCounts:
        """A snapshot of the counters."""
        out = ffi.new("ember_guard_counts *")
        lib.ember_guard_count(self._ptr(), out)
        return GuardCounts(
            events=out.events,
            allowed=out.allowed,
            misses=out.misses,
            denied=out.denied,
            read_errors=out.read_errors,
            pauses=out.pauses,
            outstanding=out.outstanding,
            orphans=out.orphans,
            last_error=out.last_error,
            locked=bool(out.locked),
        )

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ptr(self) -> Any:
        if self._native is None:
            raise OSError(errno.EBADF, "the guard is closed")
        return self._native

    def _find_orphans(self) -> list[Orphan]:
        count = self.counts().orphans
        out = ffi.new("ember_orphan[]", max(count, 1))
        found = lib.ember_guard_orphans(self._ptr(), out, count)
        return [
            Orphan(
                entry=o.entry,
                inode=o.inode or None,
                offset=o.offset,
                length=None if o.whole else o.length,
                pid=o.pid,
                reserved=bool(o.reserved),
            )
            for o in (out[i] for i in range(found))
        ]


def _release(kept: Any) -> None:
    """Give a kept buffer back now and not when the collector comes by."""
    if kept is not None:
        ffi.release(kept)


def _held_pair(keeper: Keeper, stored: Mapping[str, int]) -> tuple[int, int] | None:
    """Group and journal that outlived a predecessor: descriptors of our own, or None."""
    held = keeper.get(GROUP_NAME, JOURNAL_NAME)
    if held is not None:
        return held[0], held[1]
    if GROUP_NAME in stored and JOURNAL_NAME in stored:
        return os.dup(stored[GROUP_NAME]), os.dup(stored[JOURNAL_NAME])
    return None


def _new_pair(slots: int) -> tuple[int, int]:
    group = check(lib.ember_guard_group(), "cannot make a fanotify group of class pre-content")
    try:
        return group, check(lib.ember_guard_journal(slots), "cannot make the guard's journal")
    except OSError:
        os.close(group)
        raise


def _join(group: int, journal: int, device: int, reserve: int, predecessor_s: float) -> Any:
    """ember_guard_open, again and again while a predecessor is dying."""
    out = ffi.new("ember_guard **")
    deadline = time.monotonic() + predecessor_s
    while True:
        result = lib.ember_guard_open(out, group, journal, device, reserve)
        if result != -errno.EBUSY or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    check(
        result,
        "cannot join the guard's journal (EBUSY: another daemon has it, EPROTO: it is none)",
    )
    return out[0]
