"""A whole blob as one stream of exactly its length, over as many connections as it takes.

What was given out once is never given out again or otherwise: a broken body is taken up at the
very byte where it broke, or read past it. Whether the bytes are right the caller finds out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import CorruptError, RangeUnsupportedError, UnavailableError
from snapshotter.oci.exchange import Response
from snapshotter.oci.retry import pause_after

_RESUMES = 5
_RESUME_PROGRESS_BYTES = 1024 * 1024
_RESUME_DELAY_S = 0.25
_LONGEST_PAUSE_S = 60.0


class Resumption:
    """How often a body that breaks off is taken up: a few times in a row that bring too little.

    What brings ``progress_bytes`` or more since the last such place counts as a fresh start.
    """

    def __init__(self, clock: Clock, progress_bytes: int = _RESUME_PROGRESS_BYTES) -> None:
        self._clock = clock
        self._progress_bytes = progress_bytes
        self._failures = self._mark = 0

    async def pause(self, error: UnavailableError, done_bytes: int, *, begun: bool) -> None:
        """Wait before the next try, or raise ``error``: too many tries, too long a pause, or
        nothing has ``begun``, for the first answer's refusal is the caller's."""
        if done_bytes - self._mark >= self._progress_bytes:
            self._failures = 0
            self._mark = done_bytes
        self._failures += 1
        pause_s = pause_after(error, self._failures, _RESUME_DELAY_S)
        if not begun or self._failures > _RESUMES or pause_s > _LONGEST_PAUSE_S:
            raise error
        await self._clock.sleep(pause_s)


class BlobOpener(Protocol):
    """Opens blobs, and wants to know of a body that broke off."""

    async def open_blob(self, blob: BlobRef, extent: Extent | None) -> Response:
        """The whole blob, or ``extent`` of it; the answer's head is checked."""
        ...

    def broke_off(self, blob: BlobRef) -> None: ...


class BlobStream:
    """One reading of a blob. A body that breaks is taken up where it broke."""

    def __init__(self, opener: BlobOpener, blob: BlobRef, clock: Clock) -> None:
        self._opener = opener
        self._blob = blob
        self._resumption = Resumption(clock)
        self._offset = 0

    async def run(self) -> AsyncGenerator[bytes, None]:
        """The bytes; ends after exactly ``size_bytes`` or raises."""
        while True:
            opened = False
            try:
                response, skip = await self._continue()
                opened = True
                length = self._blob.size_bytes - self._offset + skip
                async with aclosing(exactly(response, length, name_of(self._blob))) as chunks:
                    async for chunk in chunks:
                        fresh = chunk[skip:]
                        skip -= len(chunk) - len(fresh)
                        self._offset += len(fresh)
                        if fresh:
                            yield fresh
                return
            except UnavailableError as error:
                if 0 < self._offset == self._blob.size_bytes:
                    return
                if opened:
                    self._opener.broke_off(self._blob)
                await self._resumption.pause(error, self._offset, begun=self._offset > 0)

    async def _continue(self) -> tuple[Response, int]:
        """The next answer, and how many of its first bytes are known already."""
        if self._offset == 0:
            return await self._opener.open_blob(self._blob, None), 0
        rest = Extent(self._offset, self._blob.size_bytes - self._offset)
        try:
            return await self._opener.open_blob(self._blob, rest), 0
        except RangeUnsupportedError:
            return await self._opener.open_blob(self._blob, None), self._offset


async def exactly(response: Response, length_bytes: int, what: str) -> AsyncGenerator[bytes, None]:
    """The body, held to ``length_bytes``. CorruptError if more comes, UnavailableError if less."""
    left = length_bytes
    try:
        async for chunk in response.chunks():
            left -= len(chunk)
            if left < 0:
                raise CorruptError(f"{what}: more bytes came than were asked for")
            yield chunk
        if left > 0:
            raise UnavailableError(f"{what}: the body ended {left} bytes too early")
    finally:
        await response.close()


def name_of(blob: BlobRef) -> str:
    """The blob as messages name it."""
    return f"blob {blob.repository}@{blob.digest}"
