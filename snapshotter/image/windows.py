"""The windows file of an index: sparse, maybe absent, and believed only as far as digests go.

Each window is known by its digest in the index. So whatever a crash, a foreign file or a hole
leaves here is found out when it is read, and costs no more than fetching that window again.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snapshotter.errors import (
    EmberError,
    NoSpaceError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)

WINDOWS_SUFFIX = ".win"

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
"""What is wrong with the node and not with the file."""


class WindowSource(Protocol):
    """Where windows are kept."""

    def read(self, offset: int, length: int) -> bytes:
        """These bytes of the windows file as they are, or fewer if it ends before.

        NotFoundError if there is none, RefusedError or UnavailableError if it can't be read.
        """
        ...

    def keep(self, offset: int, data: bytes) -> None:
        """Put these bytes there; NoSpaceError or UnavailableError if that can't be done."""
        ...


@dataclass(frozen=True, slots=True)
class WindowFile:
    """A windows file on disk, opened for each use: thousands of layers hold no descriptors."""

    path: Path

    def read(self, offset: int, length: int) -> bytes:
        try:
            with open(self.path, "rb", buffering=0, opener=opened) as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            raise NotFoundError(
                f"{self.path} is missing: chunks of this layer cannot be decoded one by one until "
                "the layer is indexed again"
            ) from None
        except OSError as error:
            raise unreadable(self.path, error) from None

    def keep(self, offset: int, data: bytes) -> None:
        """Not synced: what is lost or torn fails its digest, and is fetched again."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                written = os.pwrite(descriptor, data, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceError(f"no space for {self.path}") from error
            raise UnavailableError(f"{self.path} can't be written: {error.strerror}") from error
        if written != len(data):
            raise NoSpaceError(f"no space for {self.path}")


def opened(path: str, flags: int) -> int:
    """Not for ever, whatever lies there: a pipe by this name would wait for its other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def unreadable(path: Path, error: OSError) -> EmberError:
    """What a failure to read a file says: of the node, or of the file."""
    if error.errno in _PASSING:
        return UnavailableError(f"{path} can't be read just now: {error.strerror}; try again")
    return RefusedError(f"{path} can't be read ({error.strerror}): look at the disk")
