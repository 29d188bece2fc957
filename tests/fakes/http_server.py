"""A small HTTP/1.1 server for tests that can also misbehave on the wire.

It speaks real sockets (TLS too), so what is tested is the client that ships. A handler returns an
`Answer`; the answer says how its body is sent, and where the connection is cut, reset or hung.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

TLS_HANDSHAKE = b"\x16"


@dataclass(frozen=True)
class Seen:
    """A request as it came. Header names are in lower case. ``connection`` counts the server's
    connections and ``turn`` the requests on this one, both from 1."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""
    connection: int = 0
    turn: int = 0
    http2: bool = False

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query))


@dataclass
class Answer:
    """What to send. ``cut_after`` bytes of the body the connection ends as ``cut`` says:
    ``close`` (a clean end), ``reset`` (RST) or ``hang`` (nothing more until the server stops).
    After a ``last`` answer the connection ends, without a word of it in the head."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    cut_after: int | None = None
    cut: str = "close"
    chunked: bool = False
    send_length: bool = True
    drip_bytes: int | None = None
    drip_delay_s: float = 0.0
    head_delay_s: float = 0.0
    last: bool = False

    def set(self, name: str, value: str | None) -> None:
        """Replace a header; None removes it."""
        self.headers = [pair for pair in self.headers if pair[0].lower() != name.lower()]
        if value is not None:
            self.headers.append((name, value))


Handler = Callable[[Seen], Awaitable[Answer]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


class HttpServer:
    """Serves `handle` on a free port of ``address`` while it is entered."""

    def __init__(self, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        self.seen: list[Seen] = []
        self.connections = 0
        self.refuses: Callable[[int], bool] = lambda connection: False
        """Whether a connection, by its number, is reset as soon as it is there."""
        self.http2: Serve | None = None
        """Serves a connection on which HTTP/2 was agreed to; see tests/fakes/http2_wire.py."""
        self._tls = tls
        self._address = address
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._arrived = asyncio.Event()
        self.port = 0

    async def handle(self, seen: Seen) -> Answer:
        raise NotImplementedError

    @property
    def authority(self) -> str:
        return f"{self._address}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.authority}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; the second time on the same port as before."""
        self._stopping.clear()
        self._server = await asyncio.start_server(
            self._serve, self._address, self.port, ssl=self._tls, limit=1024 * 1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        if self._server is None:
            return
        self._stopping.set()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def until_asked(self, count: int) -> None:
        """Return once ``count`` requests have come."""
        while len(self.seen) < count:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), 10)

    def note(self, seen: Seen) -> None:
        """A request has come."""
        self.seen.append(seen)
        self._arrived.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        connection, turn = self.connections, 0
        try:
            if self.refuses(connection):
                await self._end(writer, "reset")
                return
            agreed = writer.get_extra_info("ssl_object")
            if self.http2 is not None and agreed.selected_alpn_protocol() == "h2":
                await self.http2(reader, writer, connection)
                return
            while (read := await _read_request(reader, writer)) is not None:
                turn += 1
                seen = replace(read, connection=connection, turn=turn)
                self.note(seen)
                if not await self._send(writer, seen, await self.handle(seen)):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, seen: Seen, answer: Answer) -> bool:
        """Send; False if the connection is to end."""
        body = b"" if seen.method == "HEAD" else answer.body
        head = [f"HTTP/1.1 {answer.status} Whatever"]
        head += [f"{name}: {value}" for name, value in answer.headers]
        if answer.chunked:
            head.append("Transfer-Encoding: chunked")
        elif answer.send_length:
            head.append(f"Content-Length: {len(answer.body)}")
        else:
            head.append("Connection: close")
        if answer.head_delay_s:
            await asyncio.sleep(answer.head_delay_s)
        if answer.cut_after == -1:  # not even a head
            return await self._end(writer, answer.cut)
        writer.write("\r\n".join(head).encode("latin-1") + b"\r\n\r\n")
        if answer.chunked and body:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        if answer.cut_after is not None:
            body = body[: answer.cut_after]
        step = answer.drip_bytes or max(1, len(body))
        for start in range(0, len(body), step):
            writer.write(body[start : start + step])
            await writer.drain()
            if answer.drip_delay_s:
                await asyncio.sleep(answer.drip_delay_s)
        await writer.drain()
        if answer.cut_after is not None:
            return await self._end(writer, answer.cut)
        return (answer.send_length or answer.chunked) and not answer.last

    async def _end(self, writer: asyncio.StreamWriter, how: str) -> bool:
        if how == "hang":
            await self._stopping.wait()
        elif how == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seen | None:
    try:
        first = await reader.readexactly(1)
        if first == TLS_HANDSHAKE:
            writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")  # as Go's servers answer, so that
            return None  # who tries TLS first learns at once that it is not spoken here
        head = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)
