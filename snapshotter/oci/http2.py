"""One HTTP/2 connection for the small GETs of many at once; h2 knows the protocol.

Windows are such that a small body never waits for one: a stream may send STREAM_BYTES unread, and
the connection's window is given back as bytes come, so that a reader who stops reading stops
nobody else. All waits end, as over HTTP/1.1, with the same errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from snapshotter.errors import DeadlineError
from snapshotter.oci.exchange import NoAnswerError, Request, without_query
from snapshotter.oci.http2_frames import FrameSplitter, GoAway
from snapshotter.oci.http2_stream import STREAM_BYTES, Http2Response, Stream, fields_of
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.trust import HTTP_2

_CONNECTION_BYTES = 16 * 1024 * 1024
_FRAME_BYTES = 64 * 1024
_UNSENT_BYTES = 1024 * 1024
"""A server that makes us answer (PING, SETTINGS) and reads none of it is given up beyond this."""
_MOST_STREAMS = 64
_MOST_RESETS = 3
"""After so many in a row there may be an end to them on another connection."""
_SILENT_S = 2.0
"""Nothing new is asked of a connection that owes answers and has been silent for so long."""


class NotTakenError(Exception):
    """The server has not begun with the request: it may be sent again, elsewhere."""


class Http2Connection(asyncio.Protocol):
    """Speaks HTTP/2 if the other side agreed to; ``speaks`` is known once it is connected."""

    def __init__(self, limits: TransportLimits, user_agent: str) -> None:
        self.limits = limits
        self.speaks = False
        self.faulty = False
        """It broke the protocol: better not try again."""
        self._user_agent = user_agent
        self._streams: dict[int, Stream] = {}
        self._splitter = FrameSplitter(_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._ending: str | None = None
        self._unacknowledged = 0
        self._resets = 0
        self._heard_s = self._idle_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        config = H2Configuration(client_side=True, header_encoding=None)
        self._h2 = H2Connection(config)
        wanted = {
            SettingCodes.ENABLE_PUSH: 0,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_BYTES,
            SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
        }
        self._h2.local_settings = Settings(client=True, initial_values=wanted)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def is_usable(self) -> bool:
        """Whether new requests can be sent, now or when others have ended."""
        return self.speaks and self._ending is None

    @property
    def has_room(self) -> bool:
        """Whether one more request can be sent now, with a good hope of an answer."""
        if not self.is_usable:
            return False
        if self._streams and self._now() - self._heard_s > _SILENT_S:
            return False
        most = min(_MOST_STREAMS, self._h2.remote_settings.max_concurrent_streams)
        return len(self._streams) < most

    async def send(self, request: Request) -> Http2Response:
        """The head of the answer. NotTakenError if it can as well be sent elsewhere."""
        if not self.has_room:
            raise NotTakenError
        where = without_query(request.url)
        stream = self._begin(request)
        try:
            while not stream.status and not stream.over:
                await stream.change(self.limits.idle_s)
        except TimeoutError:
            self._check_silence()
            raise DeadlineError(f"{where}: no answer in time (HTTP/2)") from None
        finally:
            if not stream.status:
                self.give_up(stream)
        if not stream.status:
            if stream.refused:
                raise NotTakenError
            raise NoAnswerError(f"{where}: {stream.fault}")
        return Http2Response(self, stream, request)

    def _begin(self, request: Request) -> Stream:
        if not self._streams:
            self._heard_s = self._now()
        stream = Stream(self._h2.get_next_available_stream_id())
        fields = fields_of(request, self._user_agent)
        self._h2.send_headers(stream.number, fields, end_stream=True)
        self._streams[stream.number] = stream
        self._flush()
        return stream

    def give_up(self, stream: Stream) -> None:
        """Nobody wants what is left of an answer."""
        if self._streams.pop(stream.number, None) is None:
            return
        if not stream.over and self._transport is not None:
            self._quietly(lambda: self._h2.reset_stream(stream.number, ErrorCodes.CANCEL))
            self._flush()
        stream.pieces.clear()
        self._rest()

    def consumed(self, stream: Stream, length: int) -> None:
        """The reader of ``stream`` took so many bytes; let it send more."""
        stream.unacknowledged += length
        if stream.unacknowledged >= STREAM_BYTES // 2 and not stream.over:
            more, stream.unacknowledged = stream.unacknowledged, 0
            self._quietly(lambda: self._h2.increment_flow_control_window(more, stream.number))
            self._flush()

    def _quietly(self, step: Callable[[], None]) -> None:
        """What may come too late for a stream or a connection that has just ended."""
        try:
            step()
        except ProtocolError:
            return

    # What comes from below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        agreed = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        if agreed != HTTP_2:
            self._ending = "HTTP/2 is not spoken there"
            transport.close()
            return
        self._transport = transport
        self.speaks = True
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_BYTES)
        self._flush()
        self._rest()

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._now()
        try:
            for part in self._splitter.split(data):
                if isinstance(part, GoAway):
                    self._goes_away(part)
                else:
                    self._take(self._h2.receive_data(part))
        except ProtocolError as error:
            self.faulty = True
            self._flush()
            self.abort(f"HTTP/2: {error or type(error).__name__}")
            return
        self._flush()

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, DataReceived):
                self._data(event)
            elif isinstance(event, ResponseReceived):
                self._head(event)
            elif isinstance(event, StreamEnded):
                self._stream_over(event.stream_id)
            elif isinstance(event, StreamReset):
                self._stream_over(event.stream_id, event.error_code)
            elif isinstance(event, ConnectionTerminated):
                self.abort("HTTP/2: the connection was ended")

    def _head(self, event: ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        for name, value in event.headers or ():
            text = bytes(value).decode("latin-1")
            if bytes(name) == b":status":
                if not (text.isascii() and text.isdecimal() and len(text) == 3 and text >= "100"):
                    raise ProtocolError(f"the status {text[:20]!r}")
                stream.status = int(text)
            else:
                stream.headers.add(bytes(name).decode("latin-1"), text)
        stream.wake()

    def _data(self, event: DataReceived) -> None:
        length = event.flow_controlled_length or 0
        self._unacknowledged += length
        if self._unacknowledged >= _CONNECTION_BYTES // 4:
            more, self._unacknowledged = self._unacknowledged, 0
            self._h2.increment_flow_control_window(more)
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        data = event.data or b""
        stream.unacknowledged += length - len(data)
        if data:
            stream.pieces.append(data)
            stream.wake()

    def _stream_over(self, number: int, code: int | None = None) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        if code is None:
            self._resets = 0
            stream.ended = True
            stream.wake()
        else:
            self._resets += 1
            refused = code in (ErrorCodes.REFUSED_STREAM, ErrorCodes.HTTP_1_1_REQUIRED)
            self.faulty |= code == ErrorCodes.HTTP_1_1_REQUIRED
            stream.fail(f"HTTP/2: the stream was reset ({_word(code)})", refused=refused)
            if self._resets >= _MOST_RESETS:
                self.retire()

    def _goes_away(self, told: GoAway) -> None:
        """No more requests here; those that were begun go on."""
        self._ending = self._ending or f"HTTP/2: the server goes away ({_word(told.code)})"
        for stream in list(self._streams.values()):
            if stream.number > told.last_stream:
                stream.fail(self._ending, refused=True)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        why = f"{exc}" if exc is not None else "the other side closed it"
        self._fail_all(self._ending or why)

    def abort(self, why: str) -> None:
        """End the connection now, and every answer that is under way."""
        if self._transport is not None:
            self._transport.abort()
        self._fail_all(why)

    def close(self) -> None:
        """End the connection in good order; answers under way break off."""
        if self._transport is not None and not self._transport.is_closing():
            self._quietly(self._h2.close_connection)
            self._flush()
            self._transport.close()
        self._fail_all("the connection was closed")

    def retire(self) -> None:
        """Take nothing new; close once all that is under way has ended."""
        self._ending = self._ending or "the connection is being closed"
        self._rest()

    def _fail_all(self, why: str) -> None:
        self._ending = self._ending or why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for stream in self._streams.values():
            # Without a head, a GET may be asked again: what died may have been dead for long.
            stream.fail(why, refused=True)

    def _check_silence(self) -> None:
        if self._now() - self._heard_s >= self.limits.idle_s:
            self.abort("the connection is dead")

    def _rest(self) -> None:
        """Nobody asks: close soon if it has no more use, and after a while in any case."""
        if self._streams or self._transport is None:
            return
        if self._ending is not None:
            self.close()
            return
        self._idle_since_s = self._now()
        if self._timer is None:
            self._sleep(self.limits.keep_s)

    def _sleep(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._streams:
            return
        left_s = self._idle_since_s + self.limits.keep_s - self._now()
        if left_s <= 0:
            self.close()
        else:
            self._sleep(left_s)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if not data or self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _UNSENT_BYTES:
            self.abort("HTTP/2: the server does not read what it asks for")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _word(code: int) -> str:
    try:
        return ErrorCodes(code).name.replace("_", " ").lower()
    except ValueError:
        return f"code {code}"
