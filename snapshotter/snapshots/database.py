"""The node's one sqlite database: many readers, one writer thread, commits shared by a group.

Whatever waits while a transaction is being made durable goes into the next one together, so the
price of an fsync is paid once for all of them. A write is done when its future is: then it is on
disk (WAL, synchronous=FULL). Work runs in other threads and must not touch anything but the
connection it gets; it may run twice, so it must have no effect but on the database.

Several modules keep their tables here; each brings a SchemaPiece. This module knows none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from snapshotter.errors import CorruptError, FailedPreconditionError, NoSpaceError, UnavailableError
from snapshotter.snapshots.database_room import DatabaseRoom
from snapshotter.snapshots.schema import SchemaPiece, migrate

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 4096
"""Writes that may wait for the writer; more of them are told to come back."""
MAX_GROUP: Final = 256
READERS: Final = 2
CACHE_BYTES: Final = 16 * 1024 * 1024
"""Pages that a reading connection keeps; ten thousand snapshots fit."""
LOG_BYTES: Final = 4 * 1024 * 1024
"""Size that the write-ahead log has from the start: sqlite moves its content on when it has about
that, and a file that doesn't grow needs no journal commit of the file system at each fsync."""
CHECKPOINT_GROUPS: Final = 64
LAST_CHECKPOINT_PAGES: Final = 8000
"""When the writer has to move the log itself: others did not come to it."""


@dataclass(slots=True)
class _Write:
    work: Work[object]
    future: asyncio.Future[object]
    loop: asyncio.AbstractEventLoop
    frees_space: bool
    first: Callable[[], object] | None
    result: object = None
    error: BaseException | None = None


class Database:
    """Open with ``await Database.open(path, pieces)``; ``await close()`` in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._room = DatabaseRoom(path)
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="ember-db-writer", daemon=True)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ember-db-reader")
        self._local = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []
        self._closed = False
        self._groups = 0
        self._connection: sqlite3.Connection

    @classmethod
    async def open(cls, path: Path, pieces: Sequence[SchemaPiece]) -> Database:
        """Open or create the database and bring its tables up to date.

        CorruptError if the file is damaged; FailedPreconditionError if a newer Ember wrote it.
        """
        database = cls(path)
        await asyncio.to_thread(database._start, pieces)
        return database

    async def write(
        self,
        work: Work[T],
        *,
        frees_space: bool = False,
        first: Callable[[], object] | None = None,
    ) -> T:
        """Run ``work`` in the writer; return its result once it is durable.

        What ``work`` raises undoes what it did and is raised here. NoSpaceError when the disk is
        full; a write that ``frees_space`` may then use the reserve. ``first`` runs once, in the
        same thread, before the transaction begins; where it raises, nothing is written.
        """
        if self._closed:
            raise UnavailableError(f"{self.path} is closed: the daemon is stopping")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        if self._queue.qsize() >= MAX_WAITING:
            raise UnavailableError(
                f"{self.path}: {MAX_WAITING} writes are waiting for the disk; try again later"
            )
        self._queue.put(_Write(work, future, loop, frees_space, first))
        return await future  # type: ignore[return-value]

    async def read(self, work: Work[T]) -> T:
        """Run ``work`` on an unchanging state of the database that holds every finished write."""
        if self._closed:
            raise UnavailableError(f"{self.path} is closed: the daemon is stopping")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def look(self, work: Work[T]) -> T:
        """As read, but at once, on the caller's thread: for a few rows found by key.

        They come from memory in microseconds, and readers wait for no writer; handing that to
        another thread would cost several times more. Only the event loop's thread may call it.
        """
        if self._closed:
            raise UnavailableError(f"{self.path} is closed: the daemon is stopping")
        return self._read(work)

    async def close(self) -> None:
        """Finish the writes that wait, then close. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._stop)

    def _start(self, pieces: Sequence[SchemaPiece]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)  # sqlite's other files take the mode over
        self._room.see_to()
        try:
            self._connection = self._open(pieces)
        except NoSpaceError:
            if not self._room.has_reserve():
                raise
            _log.error("%s: disk full, giving up the reserve to open it", self.path)
            self._room.give_up_reserve()
            self._connection = self._open(pieces)
        self._room.allocate_shared()
        self._room.keep_reserve()
        self._grow_log()
        self._writer.start()

    def _open(self, pieces: Sequence[SchemaPiece]) -> sqlite3.Connection:
        connection = self._connect()
        try:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise CorruptError(f"{self.path} is damaged ({verdict}); {_WAY_OUT}")
            migrate(connection, self.path, pieces)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise self._translated(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _stop(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self._readers.shutdown(wait=True)
        for connection in self._reader_connections:
            connection.close()
        self._connection.close()
        self._room.close()
        self._room.keep_reserve()  # from what the log took: the next start needs some room

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self.path, timeout=10, isolation_level=None, check_same_thread=False
            )
        except sqlite3.OperationalError as error:
            raise UnavailableError(f"cannot open {self.path}: {error}") from error
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA wal_autocheckpoint={LAST_CHECKPOINT_PAGES}")
        except sqlite3.DatabaseError as error:
            connection.close()
            raise self._translated(error) from error
        return connection

    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            connection.execute("PRAGMA query_only=ON")
            connection.execute(f"PRAGMA cache_size=-{CACHE_BYTES // 1024}")
            self._local.connection = connection
            self._reader_connections.append(connection)
        return connection

    def _read(self, work: Work[T]) -> T:
        connection = self._reader()
        try:
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise self._translated(error) from error

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group, stop = self._group(first)
            able = [write for write in group if _begun(write)]
            if able and not self._commit(able) and len(able) > 1:
                for write in able:  # one of them brought all down: each by itself
                    self._commit([write])
            for write in group:
                with contextlib.suppress(RuntimeError):  # the loop is gone, nobody waits
                    write.loop.call_soon_threadsafe(_deliver, write)
            if stop:
                return
            self._groups += 1
            if self._groups % CHECKPOINT_GROUPS == 0:
                with contextlib.suppress(RuntimeError):  # stopping: closing does it
                    self._readers.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        """Move the log into the database beside the writer, which would have to wait for it."""
        try:
            self._reader().execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.DatabaseError as error:
            _log.info("%s: its log is moved later: %s", self.path, error)

    def _group(self, first: _Write) -> tuple[list[_Write], bool]:
        group = [first]
        while len(group) < MAX_GROUP:
            try:
                write = self._queue.get_nowait()
            except queue.Empty:
                break
            if write is None:
                return group, True
            group.append(write)
        return group, False

    def _commit(self, group: list[_Write]) -> bool:
        """Run a group as one transaction; False if the transaction as a whole failed."""
        if self._attempt(group):
            return True
        if any(write.frees_space for write in group) and self._room.has_reserve():
            if not isinstance(group[0].error, NoSpaceError):
                return False
            _log.error("%s: disk full, giving up the reserve to record a removal", self.path)
            self._room.give_up_reserve()
            done = self._attempt(group)
            self._room.keep_reserve()
            return done
        return False

    def _attempt(self, group: list[_Write]) -> bool:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            if len(group) == 1:
                return self._finish_alone(group[0])
            for write in group:
                self._apply(write)
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for write in group:
                write.result, write.error = None, self._translated(error)
            return False
        return True

    def _finish_alone(self, write: _Write) -> bool:
        """As _apply and the commit, but what fails ends the transaction, which holds no other."""
        write.result, write.error = None, None
        try:
            write.result = write.work(self._connection)
        except sqlite3.OperationalError:
            raise
        except BaseException as error:
            write.error = error
            self._connection.execute("ROLLBACK")
        else:
            self._connection.execute("COMMIT")
        return True

    def _apply(self, write: _Write) -> None:
        connection = self._connection
        write.result, write.error = None, None
        connection.execute("SAVEPOINT work")
        try:
            write.result = write.work(connection)
        except sqlite3.OperationalError:
            raise  # full disk, I/O error: it may have ended the transaction of all
        except BaseException as error:
            write.error = error
            connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")

    def _grow_log(self) -> None:
        """Also leaves free pages in the database, so that changes seldom make it grow."""
        connection = self._connection
        if self._room.free_bytes() < 4 * LOG_BYTES:
            _log.warning("%s: its log starts small, for there is little room", self.path)
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE log_filler (content BLOB)")
            connection.execute("INSERT INTO log_filler VALUES (zeroblob(?))", (LOG_BYTES,))
            connection.execute("DROP TABLE log_filler")
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(RESTART)")
        except sqlite3.DatabaseError as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            _log.warning("%s: its log starts small: %s", self.path, error)

    def _translated(self, error: sqlite3.DatabaseError) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # Without room for the file that its users share sqlite speaks of an I/O error.
        full = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and self._room.is_full()
        if code == sqlite3.SQLITE_FULL or full:
            return self._room.none_left()
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return CorruptError(f"{self.path} is damaged ({error}); {_WAY_OUT}")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return UnavailableError(f"{self.path} is locked: does another process use it?")
        if code == sqlite3.SQLITE_READONLY:
            return FailedPreconditionError(f"{self.path} cannot be written: {error}")
        return UnavailableError(f"{self.path}: {error}")


_WAY_OUT = (
    "move it away together with its -wal and -shm and the directory snapshots/, start Ember, and"
    " remove the containers and images that containerd believes to be in it (`crictl rmi`,"
    " `ctr -n NAMESPACE images rm --sync`) before they are pulled anew"
)


def _begun(write: _Write) -> bool:
    if write.first is None:
        return True
    try:
        write.first()
    except Exception as error:
        write.error = error
        return False
    return True


def _deliver(write: _Write) -> None:
    if write.future.done():  # its caller was cancelled; what was written stays
        return
    if write.error is not None:
        write.future.set_exception(write.error)
    else:
        write.future.set_result(write.result)
