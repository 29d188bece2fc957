"""A gRPC server on one unix socket: calls of one request, with one answer or a stream of them.

It takes what grpcio's generated code registers and gives handlers the part of grpcio's context that
they use. One thread does everything, the event loop's: a call wakes that one and no other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NoReturn

import grpc

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.connection import Connection, Fields
from snapshotter.rpc.http2.frames import Fault
from snapshotter.rpc.http2.stream import CompressedError, Stream, TooLongError, framed

log = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]

_HEADERS = frames.fields(((":status", "200"), ("content-type", "application/grpc")))
_OK = frames.fields((("grpc-status", "0"),))
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MOST_DIGITS: Final = 8
"""Of a timeout, as gRPC has it."""
_NOT_METADATA: Final = ("te", "content-type", "grpc-timeout", "grpc-accept-encoding")
_BACKLOG: Final = 1024
_MOST_CONNECTIONS: Final = 1024
"""Clients have one or two; descriptors are for reads that wait."""
_SILENT_S: Final = 1.0
_LARGE_BYTES: Final = 64 * 1024
_MOST_HELD: Final = 4
"""So many of the longest requests may be on their way at once; small ones always may."""


class AbortError(Exception):
    """A handler has ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details, self.trailing = code, details, trailing


class Context:
    """What a handler knows of its call, and how it refuses it."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        """What the client has sent beside its request."""
        return self._metadata

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call; never returns."""
        raise AbortError(code, details, trailing_metadata)


class Call(Stream):
    """A call on the server: its stream, who handles it, and its deadline."""

    def __init__(self, number: int, window: int, most_bytes: int) -> None:
        super().__init__(number, window, most_bytes)
        self.handler: Any = None
        self.metadata: Metadata = ()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.has_answered = False
        self.held_bytes = 0


class LoopServer:
    """Register handlers, ``start`` on a listening socket, ``stop``."""

    def __init__(self, *, most_message_bytes: int, most_calls: int) -> None:
        self.most_message_bytes = most_message_bytes
        self.most_calls = most_calls
        self.handlers: dict[str, Any] = {}
        self.connections: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.held_bytes = 0
        """Of requests that are not whole yet."""
        self.silent_until_s = 0.0
        """Nothing is said of what other clients do until then."""
        self._listening: asyncio.AbstractServer | None = None

    @property
    def is_full(self) -> bool:
        """Whether no more of long requests is taken now."""
        return self.held_bytes > _MOST_HELD * self.most_message_bytes

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Part of grpcio's registration; the same handlers come by name, too."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        """Part of grpcio's registration: the methods of a service."""
        for name, handler in methods.items():
            if handler.request_streaming:
                raise ValueError(f"{service}.{name}: a stream of requests is not served here")
            self.handlers[f"/{service}/{name}"] = handler

    async def start(self, listening: socket.socket) -> None:
        """Serve on a bound socket, which is ours from now on."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(
            lambda: ServerConnection(self), sock=listening, backlog=_BACKLOG
        )

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, give those under way ``grace_s`` seconds, close everything."""
        if self._listening is None:
            return
        self._listening.close()
        for connection in list(self.connections):
            connection.say_goodbye()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=grace_s)
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=1.0)
        for connection in list(self.connections):
            connection.close()


class ServerConnection(Connection):
    """One client: containerd, or the command line."""

    def __init__(self, server: LoopServer) -> None:
        super().__init__(is_client=False, most_streams=server.most_calls)
        self._server = server
        self._is_leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.connections.add(self)
        super().connection_made(transport)
        if len(self._server.connections) > _MOST_CONNECTIONS:
            self.fail(Fault.ENHANCE_YOUR_CALM, "there are too many connections")

    def say_goodbye(self) -> None:
        """No more calls are taken; the client makes them elsewhere."""
        self._is_leaving = True
        self.write(frames.goaway(self.last_stream, Fault.NO_ERROR))

    # -- what comes -----------------------------------------------------------------------------

    def on_headers(self, number: int, fields: Fields, ended: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:  # a client's trailers end its request
            if ended:
                self.on_end(stream)
            return
        if number % 2 == 0 or number <= self.last_stream:
            if number <= self.last_stream and number % 2:
                return  # of a call that has ended here
            raise frames.WireError(Fault.PROTOCOL_ERROR, "a stream with a wrong number")
        self.last_stream = number
        most = self._server.most_calls
        if self._is_leaving or max(len(self._server.tasks), len(self.streams)) >= most:
            self.write(frames.reset(number, Fault.REFUSED_STREAM))
            return
        call = Call(number, self._initial_window, self._server.most_message_bytes)
        self.streams[number] = call
        self._begin(call, fields)
        if ended and not call.is_over:
            self.on_end(call)

    def _begin(self, call: Call, fields: Fields) -> None:
        path, timeout = "", ""
        for name, value in fields:
            if name == ":path":
                path = value
            elif name == "grpc-timeout":
                timeout = value
        call.handler = self._server.handlers.get(path)
        call.metadata = [
            (name, value) for name, value in fields if name[:1] != ":" and name not in _NOT_METADATA
        ]
        if call.handler is None:
            self._refuse(call, grpc.StatusCode.UNIMPLEMENTED, f"there is no method {path[:200]}")
        elif timeout:
            number, unit = timeout[:-1], _UNITS.get(timeout[-1])
            if unit and number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS:
                loop = asyncio.get_running_loop()
                call.timer = loop.call_later(min(int(number) * unit, 1e7), self._expired, call)

    def on_data(self, stream: Stream, data: bytes, taken: int) -> None:
        assert isinstance(stream, Call)
        self._hold(stream, len(data))
        try:
            stream.feed(data)
        except TooLongError as error:
            self._refuse(stream, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except CompressedError:
            text = "messages are taken uncompressed only"
            self._refuse(stream, grpc.StatusCode.UNIMPLEMENTED, text)
        else:
            self.took(stream, taken)
            if len(stream.messages) > 1:
                text = "more than one request in a call"
                self._refuse(stream, grpc.StatusCode.INVALID_ARGUMENT, text)
            elif self._server.is_full and stream.held_bytes > _LARGE_BYTES:
                text = "too many long requests at once; ask again"
                self._refuse(stream, grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    def on_end(self, stream: Stream) -> None:
        assert isinstance(stream, Call)
        if stream.task is not None:
            return
        if not stream.messages:
            self._refuse(stream, grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
            return
        self._let_go(stream)
        task = asyncio.get_running_loop().create_task(self._run(stream, stream.messages.popleft()))
        stream.task = task
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        assert isinstance(stream, Call)
        self._let_go(stream)

    def on_reset(self, stream: Stream, fault: int) -> None:
        self._leave(stream)

    def on_lost(self, stream: Stream, why: str) -> None:
        self._leave(stream)

    def on_fault(self, what: str) -> None:
        now_s, server = asyncio.get_running_loop().time(), self._server
        if now_s >= server.silent_until_s:
            server.silent_until_s = now_s + _SILENT_S
            log.warning("a client's connection was closed: %s", what)

    def on_closed(self) -> None:
        self._server.connections.discard(self)

    def _hold(self, call: Call, count: int) -> None:
        call.held_bytes += count
        self._server.held_bytes += count

    def _let_go(self, call: Call) -> None:
        self._server.held_bytes -= call.held_bytes
        call.held_bytes = 0

    def _leave(self, stream: Stream) -> None:
        """The client waits no longer."""
        assert isinstance(stream, Call)
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.task is not None:
            stream.task.cancel()

    def _expired(self, call: Call) -> None:
        if not call.is_over:
            self._refuse(call, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            if call.task is not None:
                call.task.cancel()

    # -- what is answered -----------------------------------------------------------------------

    async def _run(self, call: Call, body: bytes) -> None:
        try:
            await self._handle(call, call.handler, body)
        except AbortError as stop:
            self._refuse(call, stop.code, stop.details, stop.trailing)
        except asyncio.CancelledError:
            self._refuse(call, grpc.StatusCode.CANCELLED, "the daemon is stopping")
            raise
        except Exception as error:
            if isinstance(error, ConnectionError) and call.is_over:
                return  # the client has gone
            log.exception("a call failed unexpectedly")
            self._refuse(call, grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}")
        finally:
            if call.timer is not None:
                call.timer.cancel()

    async def _handle(self, call: Call, handler: Any, body: bytes) -> None:
        context = Context(call.metadata)
        request = handler.request_deserializer(body)
        if not handler.response_streaming:
            reply = await handler.unary_unary(request, context)
            await self._answer(call, framed(handler.response_serializer(reply)))
            return
        self._open(call)
        async with aclosing(handler.unary_stream(request, context)) as replies:
            async for reply in replies:
                await self.send(call, framed(handler.response_serializer(reply)))
        self._end(call, frames.headers(call.number, _OK, frames.END_STREAM))

    async def _answer(self, call: Call, message: bytes) -> None:
        if call.is_over:
            return
        trailers = frames.headers(call.number, _OK, frames.END_STREAM)
        if self.fits(call, len(message)):
            call.has_answered = True
            start = frames.headers(call.number, _HEADERS)
            self._end(call, b"".join((start, self.data(call, message), trailers)))
            return
        self._open(call)
        await self.send(call, message)
        self._end(call, trailers)

    def _open(self, call: Call) -> None:
        if not call.is_over:
            call.has_answered = True
            self.write(frames.headers(call.number, _HEADERS))

    def _end(self, call: Call, last: bytes) -> None:
        if not call.is_over:
            self.write(last)
            self.forget(call)

    def _refuse(
        self, call: Call, code: grpc.StatusCode, details: str, trailing: Metadata = ()
    ) -> None:
        if call.is_over:
            return
        said = (
            ("grpc-status", str(code.value[0])),
            ("grpc-message", frames.status_text(details)),
            *trailing,
        )
        block = frames.fields(said)
        if not call.has_answered:
            block = _HEADERS + block
        last = frames.headers(call.number, block, frames.END_STREAM)
        if call.task is None:  # the client may still be sending: it need not go on
            last += frames.reset(call.number, Fault.NO_ERROR)
        self._end(call, last)
