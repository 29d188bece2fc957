"""The client's side of a connection: calls begun, their answers, and the status that ends each.

Every call gets exactly one status, whatever the server does, and also when the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc.aio import Metadata as GrpcMetadata

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.connection import Connection, Fields
from snapshotter.rpc.http2.frames import Fault
from snapshotter.rpc.http2.stream import CompressedError, Stream, TooLongError

Metadata = Sequence[tuple[str, str]]

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_LAST_STREAM: Final = 2**31 - 3
_FAULT_CODES: Final = {
    Fault.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    Fault.CANCEL: grpc.StatusCode.CANCELLED,
    Fault.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True, slots=True)
class Status:
    """How a call has ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        trailing = GrpcMetadata(*self.trailing)
        return grpc.aio.AioRpcError(self.code, GrpcMetadata(), trailing, self.details, None)


class Answers(Stream):
    """A call's stream on the client: its messages, and in the end its status."""

    def __init__(self, number: int, window: int, most_bytes: int) -> None:
        super().__init__(number, window, most_bytes)
        self.status: Status | None = None
        self.owed = 0
        """Bytes of messages that nobody has taken yet, kept off the peer's window."""
        self._waiter: asyncio.Future[None] | None = None

    def end(self, status: Status) -> None:
        """Nothing more comes; the first word counts."""
        self.status = self.status or status
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until there is a message or the status."""
        while not self.messages and self.status is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class ClientConnection(Connection):
    """One connection to the server."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(is_client=True)
        self._most_bytes = most_bytes
        self._next = 1
        self._is_leaving = False

    @property
    def takes_calls(self) -> bool:
        """Whether one more call can begin on it."""
        return self.is_open and not self._is_leaving and self._next < _LAST_STREAM

    def begin(self, block: bytes) -> Answers:
        """Begin a call."""
        answers = Answers(self._next, self._initial_window, self._most_bytes)
        self.streams[answers.number] = answers
        self._next += 2
        self.write(frames.headers(answers.number, block))
        return answers

    def finish(self, answers: Answers) -> None:
        """Everything is sent."""
        if not answers.is_over:
            self.write(self.data(answers, b"", frames.END_STREAM))

    def cancel(self, answers: Answers) -> None:
        """Break a call off that has not ended."""
        if not answers.is_over:
            self.write(frames.reset(answers.number, Fault.CANCEL))
            self.forget(answers)
        answers.end(Status(grpc.StatusCode.CANCELLED, "the call was cancelled"))

    def took_message(self, answers: Answers) -> bytes:
        """The next message; the peer may send more once all are taken."""
        message = answers.messages.popleft()
        if not answers.messages and answers.owed:
            owed, answers.owed = answers.owed, 0
            self.took(answers, owed)
        return message

    def on_headers(self, number: int, fields: Fields, ended: bool) -> None:
        answers = self.streams.get(number)
        if not isinstance(answers, Answers):
            return
        said = dict(fields)
        if ended:
            self._end(answers, _status(said, fields))
        elif said.get(":status", "200") != "200":
            what = f"the answer is HTTP {said[':status']}"
            self._break(answers, Status(grpc.StatusCode.UNKNOWN, what))

    def on_data(self, stream: Stream, data: bytes, taken: int) -> None:
        assert isinstance(stream, Answers)
        try:
            stream.feed(data)
        except TooLongError as error:
            self._break(stream, Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)))
            return
        except CompressedError:
            what = "the answer is compressed, which was not asked for"
            self._break(stream, Status(grpc.StatusCode.INTERNAL, what))
            return
        if stream.messages:
            stream.owed += taken
            stream.wake()
        else:
            self.took(stream, taken)

    def on_end(self, stream: Stream) -> None:
        assert isinstance(stream, Answers)
        self._end(stream, Status(grpc.StatusCode.INTERNAL, "the answer ended without a status"))

    def on_reset(self, stream: Stream, fault: int) -> None:
        assert isinstance(stream, Answers)
        code = next((c for f, c in _FAULT_CODES.items() if f == fault), grpc.StatusCode.INTERNAL)
        stream.end(Status(code, f"the service broke the call off (HTTP/2 error {fault})"))

    def on_lost(self, stream: Stream, why: str) -> None:
        assert isinstance(stream, Answers)
        stream.end(Status(grpc.StatusCode.UNAVAILABLE, f"the connection has ended: {why}"))

    def on_goaway(self, last: int) -> None:
        self._is_leaving = True
        for stream in [one for one in self.streams.values() if one.number > last]:
            self.forget(stream)
            self.on_lost(stream, "the service is stopping")
        self._close_if_left()

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        self._close_if_left()

    def _close_if_left(self) -> None:
        """The last call of a connection that takes no more has ended: nobody else would close."""
        if self._is_leaving and not self.streams:
            self.close()

    def on_fault(self, what: str) -> None:
        for stream in list(self.streams.values()):
            self.forget(stream)
            self.on_lost(stream, what)

    def _end(self, answers: Answers, status: Status) -> None:
        self.forget(answers)
        answers.end(status)

    def _break(self, answers: Answers, status: Status) -> None:
        self.write(frames.reset(answers.number, Fault.CANCEL))
        self._end(answers, status)


def _status(said: dict[str, str], fields: Fields) -> Status:
    text = said.get("grpc-status", "")
    if not text.isascii() or not text.isdigit():
        return Status(grpc.StatusCode.UNKNOWN, f"an answer without a status: {said}"[:500])
    trailing = [
        (name, value)
        for name, value in fields
        if name[:1] != ":" and name[:5] != "grpc-" and name != "content-type"
    ]
    code = _CODES.get(int(text), grpc.StatusCode.UNKNOWN)
    return Status(code, unquote(said.get("grpc-message", "")), trailing)
