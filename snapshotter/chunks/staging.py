"""Plain bytes of a whole stream, kept apart until the stream turned out to be what was promised.

Invariant: nothing of it can be read as part of a view before seal(), whatever is killed when. The
caller checks the whole digest; seal() believes it. It does not know the format of the stream.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from ioengine.threads import start_writing_back, write_fully
from snapshotter.chunks.datafile import padded
from snapshotter.chunks.space import Space, is_full
from snapshotter.content import Digest
from snapshotter.errors import FailedPreconditionError, NoSpaceError, UnavailableError

_ROOM_TRIES = 8
_STEP_BYTES = 8 * 1024 * 1024
"""So much is reserved at a time, while there is as much."""


class Staging:
    """Not a view yet; made by ViewStore.stage(), ended by the store's seal() or by discard()."""

    def __init__(
        self, view: Digest, path: Path, space: Space, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.view = view
        self.path = path
        self.length_bytes = 0
        self._space = space
        self._loop = loop
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def sink(self, offset: int, data: memoryview) -> None:
        """Write plain bytes where they belong; blocks: for a worker thread, never the loop's.

        NoSpaceError when nothing more can be evicted, UnavailableError when the disk refuses,
        FailedPreconditionError after the end.
        """
        for _ in range(_ROOM_TRIES):
            try:
                self._write(offset, data)
                return
            except NoSpaceError:
                if not self._space.make_room_from_thread(self._loop, len(data)):
                    raise
        self._write(offset, data)

    def read(self, offset: int, length: int) -> bytes:
        """Staged bytes, for a view that is open already and takes over what it lacks; blocks."""
        return os.pread(self._fd, length, offset)

    def give_back(self, length: int) -> None:
        """Keep the first ``length`` bytes only: the others have been taken over; blocks."""
        os.ftruncate(self._fd, length)

    def settle(self, length: int) -> None:
        """Give the file the size of a view of ``length`` bytes and sync it; blocks."""
        os.ftruncate(self._fd, padded(length))
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, which stays where it is; twice is harmless."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def discard(self) -> None:
        """Close and remove; twice is harmless."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, offset: int, data: memoryview) -> None:
        with self._lock:
            if self._fd < 0:
                raise FailedPreconditionError(f"the stream of {self.view} was ended already")
            try:
                self._reserve(offset + len(data))
                write_fully(self._fd, data, offset)
                start_writing_back(self._fd, offset, len(data))
            except OSError as error:
                if is_full(error):
                    raise self._space.full(error.strerror or "full") from error
                raise UnavailableError(
                    f"{self.path} cannot be written ({error.strerror}); look at the disk"
                ) from error
        self.length_bytes = max(self.length_bytes, offset + len(data))

    def _reserve(self, end: int) -> None:
        """Room for all bytes up to ``end``, which leaves to others what is theirs."""
        start = self._reserved_bytes
        if end <= start:
            return
        length = max(end - start, _STEP_BYTES)
        try:
            self._space.reserve(self._fd, start, length, demand=False)
        except NoSpaceError:
            length = end - start
            self._space.reserve(self._fd, start, length, demand=False)
        self._reserved_bytes = start + length
