"""A gRPC channel to one unix socket, for grpcio's generated stubs: what they ask of a channel.

It connects when it is first used and again whenever the connection has gone; there is no thread and
no timer while nothing is asked. Calls fail as grpcio's do, with its error class.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.client import Answers, ClientConnection, Status
from snapshotter.rpc.http2.frames import Fault
from snapshotter.rpc.http2.stream import framed

Metadata = Sequence[tuple[str, str]]

CONNECT_S: Final = 5.0
EOF: Final = object()
"""What is read after the last message."""
NO_CONNECTION: Final = "failed to connect to all addresses"
"""How gRPC begins what it says when nobody listens; the cause stands at the end."""
_LONGEST_TIMEOUT_MS: Final = 99_999_999
_EXPIRED = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Channel:
    """One connection at a time; ``close`` ends it and the calls on it."""

    def __init__(self, path: Path, most_message_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_message_bytes
        self._connection: ClientConnection | None = None
        self._connecting = asyncio.Lock()

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Method:
        """Called by generated code, as the two below are."""
        return Method(self, method, request_serializer, response_deserializer)

    unary_stream = unary_unary

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Method:
        return Method(self, method, request_serializer, response_deserializer, sends_many=True)

    async def connected(self) -> ClientConnection:
        """A connection that takes calls; AioRpcError where there is none."""
        if self._connection is not None and self._connection.takes_calls:
            return self._connection
        async with self._connecting:
            if self._connection is None or not self._connection.takes_calls:
                self._connection = await self._connect()
        return self._connection

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await loop.create_unix_connection(
                    lambda: ClientConnection(self._most_bytes), str(self._path)
                )
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error) or "no answer"
            text = f"{NO_CONNECTION}; last error: {self._path}: {why}"
            raise Status(grpc.StatusCode.UNAVAILABLE, text).error() from None
        return made

    async def close(self, grace_s: float | None = None) -> None:
        """End the connection; calls under way fail."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_goaway(0)
            connection.close()


@dataclass(frozen=True, slots=True)
class Method:
    """What a stub has for each method of its service."""

    channel: Channel
    name: str
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]
    sends_many: bool = False

    def __call__(
        self, request: Any = None, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> Call:
        return Call(self, request, timeout, metadata)


class Call:
    """One call, begun when it is made. Await it for its one answer, or ``read`` (and ``write``)."""

    def __init__(
        self, method: Method, request: Any, timeout_s: float | None, metadata: Metadata
    ) -> None:
        self._method = method
        self._connection: ClientConnection | None = None
        self._answers: Answers | None = None
        self._failure: Status | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._expire) if timeout_s is not None else None
        block = _fields(method.name, timeout_s, metadata)
        self._begun = loop.create_task(self._begin(block, request))
        self._begun.add_done_callback(_heard)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._one().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (message := await self.read()) is not EOF:
                yield message
        finally:  # who reads no further wants no more of it
            self.cancel()

    async def read(self) -> Any:
        """The next message, or EOF after the last; AioRpcError where the call has failed."""
        connection, answers = await self._started()
        await answers.wait()
        if answers.messages:
            return self._method.read(connection.took_message(answers))
        self._stop_timer()
        status = answers.status
        if status is None or status.code is not grpc.StatusCode.OK:
            raise (status or _EXPIRED).error()
        return EOF

    async def write(self, message: Any) -> None:
        """Send one message of many."""
        connection, answers = await self._started()
        try:
            await connection.send(answers, framed(self._method.write(message)))
        except ConnectionError:
            await self._raise_status(answers)

    async def done_writing(self) -> None:
        """No more messages are sent."""
        connection, answers = await self._started()
        connection.finish(answers)

    def cancel(self) -> None:
        """Break the call off, unless it has ended."""
        self._stop_timer()
        self._begun.cancel()
        if self._connection is not None and self._answers is not None:
            self._connection.cancel(self._answers)

    async def _one(self) -> Any:
        try:
            message = await self.read()
            if message is EOF:
                text = "the call has ended without an answer"
                raise Status(grpc.StatusCode.INTERNAL, text).error()
            await self._expect_end()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return message

    async def _expect_end(self) -> None:
        if await self.read() is not EOF:
            self.cancel()
            raise Status(grpc.StatusCode.INTERNAL, "more than one answer").error()

    async def _begin(self, block: bytes, request: Any) -> None:
        connection = await self._method.channel.connected()
        self._connection, self._answers = connection, connection.begin(block)
        if self._method.sends_many:
            return
        try:
            await connection.send(self._answers, framed(self._method.write(request)))
        except ConnectionError:
            return  # the status says why
        connection.finish(self._answers)

    async def _started(self) -> tuple[ClientConnection, Answers]:
        if not self._begun.done():
            await asyncio.wait([self._begun])
        if self._begun.cancelled():
            failure = self._failure or Status(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise failure.error()
        self._begun.result()
        assert self._connection is not None and self._answers is not None
        return self._connection, self._answers

    async def _raise_status(self, answers: Answers) -> None:
        await answers.wait()
        status = answers.status or Status(grpc.StatusCode.UNAVAILABLE, "the call has ended")
        raise status.error()

    def _expire(self) -> None:
        self._failure = _EXPIRED
        if self._connection is None or self._answers is None:
            self._begun.cancel()
        elif not self._answers.is_over:
            self._connection.write(frames.reset(self._answers.number, Fault.CANCEL))
            self._connection.forget(self._answers)
            self._answers.end(_EXPIRED)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _fields(name: str, timeout_s: float | None, metadata: Metadata) -> bytes:
    pairs = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", name),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "ember"),
        *metadata,
    ]
    if timeout_s is not None:
        left_ms = max(1, min(int(timeout_s * 1000), _LONGEST_TIMEOUT_MS))
        pairs.insert(4, ("grpc-timeout", f"{left_ms}m"))
    return frames.fields(pairs)


def _heard(task: asyncio.Task[None]) -> None:
    """Whoever reads hears of a fault; nobody may."""
    if not task.cancelled():
        task.exception()
