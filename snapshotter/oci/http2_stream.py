"""One answer over HTTP/2: what has come of it, and how it is read.

A stream may send STREAM_BYTES unread; what its reader takes is given back to it through the
carrier, the connection that it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from multidict import CIMultiDict

from snapshotter.errors import DeadlineError, UnavailableError
from snapshotter.oci.exchange import Request, redacted, without_query
from snapshotter.oci.limits import Pace, TransportLimits

STREAM_BYTES = 1024 * 1024

_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"}
)


class Carrier(Protocol):
    """What an answer needs of its connection."""

    @property
    def limits(self) -> TransportLimits: ...

    def consumed(self, stream: Stream, length: int) -> None:
        """So many bytes were read."""
        ...

    def give_up(self, stream: Stream) -> None:
        """The answer was read to its end, or nobody wants the rest."""
        ...


class Stream:
    """What has come of one answer and was not read yet. Woken up at every change."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.pieces: list[bytes] = []
        self.unacknowledged = 0
        self.ended = False
        self.fault: str | None = None
        self.refused = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        return self.ended or self.fault is not None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, fault: str, *, refused: bool = False) -> None:
        if not self.over:
            self.fault, self.refused = fault, refused
            self.wake()

    async def change(self, timeout_s: float) -> None:
        """Return when something has come. Raises TimeoutError."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiter
        finally:
            self._waiter = None


class Http2Response:
    """A Response over one stream."""

    def __init__(self, carrier: Carrier, stream: Stream, request: Request) -> None:
        self._carrier = carrier
        self._stream = stream
        self._request = request

    @property
    def status(self) -> int:
        return self._stream.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._stream.headers

    def header_values(self, name: str) -> list[str]:
        return self._stream.headers.getall(name, [])

    def redacted(self, text: str) -> str:
        return redacted(self._request, text)

    async def chunks(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        limits, stream = self._carrier.limits, self._stream
        pace = Pace(limits.idle_s, limits.slowest_bytes_per_s)
        where = without_query(self._request.url)
        try:
            while True:
                began = clock()
                try:
                    while not stream.pieces and not stream.over:
                        await stream.change(limits.idle_s)
                except TimeoutError:
                    raise DeadlineError(f"{where}: the body stopped coming") from None
                if not stream.pieces:
                    break
                data = b"".join(stream.pieces)
                stream.pieces.clear()
                self._carrier.consumed(stream, len(data))
                if pace.too_slow(clock() - began, len(data)):
                    raise DeadlineError(f"{where}: the body comes too slowly")
                yield data
            if stream.fault is not None:
                raise UnavailableError(
                    f"{where}: the connection broke in mid-body ({stream.fault})"
                )
        finally:
            await self.close()

    async def close(self) -> None:
        self._carrier.give_up(self._stream)


def fields_of(request: Request, user_agent: str) -> list[tuple[str, str]]:
    """The header fields of a request, in lower case, without those of one hop of HTTP/1.1."""
    parts = urlsplit(request.url)
    sent = {name.lower(): value for name, value in request.headers.items()}
    sent |= {name.lower(): value for name, value in request.home_headers.items()}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = [
        (":method", request.method),
        (":scheme", parts.scheme),
        (":authority", sent.get("host") or parts.netloc.rpartition("@")[2]),
        (":path", target),
        ("user-agent", user_agent),
        ("accept-encoding", "identity"),
    ]
    own = {name for name, _ in fields[4:]} - sent.keys()
    fields = [field for field in fields if field[0].startswith(":") or field[0] in own]
    return fields + [pair for pair in sent.items() if pair[0] not in _NOT_FORWARDED]
