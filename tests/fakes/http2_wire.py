"""The server's side of HTTP/2, so that what a test's server answers can be had over it too.

Of an `Answer` that is cut, ``close`` ends the whole connection, ``reset`` the stream, and ``hang``
leaves it as it is. A ``last`` answer is preceded by GOAWAY, after which others still go on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamReset, WindowUpdated
from h2.exceptions import ProtocolError
from hyperframe.frame import GoAwayFrame

from tests.fakes.http_server import Answer, HttpServer, Seen

Handle = Callable[[Seen], Awaitable[Answer]]


def speak_http2(server: HttpServer, context: ssl.SSLContext) -> None:
    """Have ``server``, which uses ``context``, offer HTTP/2 beside HTTP/1.1."""
    context.set_alpn_protocols(["h2", "http/1.1"])

    async def handle(seen: Seen) -> Answer:
        server.note(seen)
        return await server.handle(seen)

    async def serve(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        await Http2Wire(reader, writer, handle).run(connection)

    server.http2 = serve


class Http2Wire:
    """One connection. ``handle`` is called for each request; `run` returns at its end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handle
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handle = handle
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="latin-1"))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._window = asyncio.Event()
        self._turn = self._newest = 0
        self._last = 2**31

    async def run(self, connection: int) -> None:
        self._h2.initiate_connection()
        self._flush()
        try:
            while data := await self._reader.read(64 * 1024):
                for event in self._h2.receive_data(data):
                    if isinstance(event, RequestReceived) and event.stream_id <= self._last:
                        self._newest = event.stream_id
                        self._turn += 1
                        seen = _seen(event, connection, self._turn)
                        task = asyncio.create_task(self._answer(event.stream_id, seen))
                        self._tasks[event.stream_id] = task
                    elif isinstance(event, StreamReset):
                        if event.stream_id in self._tasks:
                            self._tasks.pop(event.stream_id).cancel()
                    elif isinstance(event, WindowUpdated):
                        self._window.set()
                self._flush()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())

    async def _answer(self, stream: int, seen: Seen) -> None:
        answer = await self._handle(seen)
        try:
            await self._send(stream, answer)
        except ProtocolError:  # the client gave the stream up, or the connection is over
            return

    async def _send(self, stream: int, answer: Answer) -> None:
        await asyncio.sleep(answer.head_delay_s)
        if answer.last:
            frame = GoAwayFrame(0)
            frame.last_stream_id = self._last = self._newest
            self._writer.write(frame.serialize())
        if answer.cut_after == -1:
            return await self._cut(stream, answer.cut)
        fields = [(":status", str(answer.status))]
        fields += [(k.lower(), v) for k, v in answer.headers if k.lower() != "connection"]
        if answer.send_length and not answer.chunked:
            fields.append(("content-length", str(len(answer.body))))
        self._h2.send_headers(stream, fields)
        self._flush()
        body = answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
        step = answer.drip_bytes or 16 * 1024
        for start in range(0, len(body), step):
            await self._data(stream, body[start : start + step])
            await asyncio.sleep(answer.drip_delay_s)
        if answer.cut_after is not None:
            return await self._cut(stream, answer.cut)
        self._h2.end_stream(stream)
        self._flush()
        return None

    async def _data(self, stream: int, data: bytes) -> None:
        while data:
            room = self._h2.local_flow_control_window(stream)
            if room <= 0:
                self._window.clear()
                await self._window.wait()
                continue
            some = min(room, self._h2.max_outbound_frame_size, len(data))
            self._h2.send_data(stream, data[:some])
            self._flush()
            await self._writer.drain()
            data = data[some:]

    async def _cut(self, stream: int, how: str) -> None:
        if how == "close":
            self._writer.close()
        elif how == "reset":
            self._h2.reset_stream(stream, ErrorCodes.INTERNAL_ERROR)
            self._flush()


def _seen(event: RequestReceived, connection: int, turn: int) -> Seen:
    fields = {str(name): str(value) for name, value in event.headers or ()}
    method, target = fields.pop(":method"), fields.pop(":path")
    fields["host"] = fields.pop(":authority")
    del fields[":scheme"]
    return Seen(method, target, fields, connection=connection, turn=turn, http2=True)
