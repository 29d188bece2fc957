"""What the chunk store needs of an I/O engine: big aligned reads and writes, and a sync.

The consumer's side of the contract; ioengine's engines fulfil it. It knows no chunk.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class BulkBuffer(Protocol):
    """A page-aligned piece of memory that is the caller's until the operation completes."""

    @property
    def memory(self) -> memoryview:
        """Its bytes, writable."""
        ...


class BulkBuffers(Protocol):
    """A bounded pool: taking waits while all are in use."""

    def take(self) -> AbstractAsyncContextManager[Any]:
        """A BulkBuffer for the length of an ``async with``."""
        ...


class BulkIo(Protocol):
    """Completion-based file I/O; short transfers are completed, errors raise OSError."""

    def buffers(self) -> BulkBuffers:
        """The pool of the engine's own buffers."""
        ...

    async def read(self, fd: int, buffer: Any, file_offset: int, length: int) -> int:
        """Read into the buffer's start; less than ``length`` only at the end of the file."""
        ...

    async def write(
        self, fd: int, buffer: Any, file_offset: int, length: int, *, sync: bool = False
    ) -> int:
        """Write from the buffer's start."""
        ...

    async def fdatasync(self, fd: int) -> None:
        """Return when the data of ``fd`` is on the disk."""
        ...
