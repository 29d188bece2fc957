"""One HTTP/2 connection, of either side: frames, settings, windows, pings, and its end.

All of it runs where the event loop does: what arrives is answered without another thread's being
woken. What a peer may make us keep is bounded: by the windows that we give it, by the length of a
header block, and by not reading on while it does not read our answers.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

import hpack

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.frames import Fault, Kind, Setting, WireError
from snapshotter.rpc.http2.stream import STREAM_WINDOW, Stream

Fields = tuple[tuple[str, str], ...]

CONNECTION_WINDOW: Final = 16 << 20
MOST_HEADER_BYTES: Final = 64 * 1024
_KNOWN_BLOCKS: Final = 64
_LONGEST_KNOWN: Final = 256


class Connection(asyncio.Protocol):
    """Frames in and out. What a side makes of them is in the hooks at the end."""

    def __init__(self, *, is_client: bool, most_streams: int = 0) -> None:
        self._is_client = is_client
        self._most_streams = most_streams
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._awaits_preface = not is_client
        self._decoder = hpack.Decoder(max_header_list_size=MOST_HEADER_BYTES)
        self._blocks: dict[bytes, Fields] = {}
        self._partial: tuple[int, int, bytearray] | None = None
        self._window = frames.USUAL_WINDOW
        self._initial_window = frames.USUAL_WINDOW
        self._unread = 0
        self._paused = False
        self._held: list[bytes] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self.streams: dict[int, Stream] = {}
        self.last_stream = 0
        """The highest stream that the peer has begun."""

    # -- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        ours = [
            (Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
            (Setting.MAX_HEADER_LIST_SIZE, MOST_HEADER_BYTES),
        ]
        if self._is_client:
            ours.append((Setting.ENABLE_PUSH, 0))
        else:
            ours.append((Setting.MAX_CONCURRENT_STREAMS, self._most_streams))
        more = frames.window_update(0, CONNECTION_WINDOW - frames.USUAL_WINDOW)
        start = frames.PREFACE if self._is_client else b""
        self.write(start + frames.settings(ours) + more)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._held = []
        try:
            self._take_frames()
        except WireError as error:
            self.fail(error.fault, str(error))
        finally:
            held, self._held = self._held, None
            if held:
                self.write(b"".join(held))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        for stream in list(self.streams.values()):
            self.forget(stream)
            self.on_lost(stream, str(error or "the connection was closed"))
        self._wake()
        self.on_closed()

    def pause_writing(self) -> None:
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._wake()

    # -- what both sides send -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send frames; what answers one read of the socket goes out in one write."""
        if self._held is not None:
            self._held.append(data)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def fits(self, stream: Stream, length: int) -> bool:
        """Whether so many bytes can be sent at once, in one frame."""
        room = min(self._window, stream.window, frames.MOST_FRAME_BYTES)
        return length <= room and not self._paused

    def data(self, stream: Stream, payload: bytes | memoryview, flags: int = 0) -> bytes:
        """A DATA frame that ``fits``; its bytes are taken off the windows."""
        self._window -= len(payload)
        stream.window -= len(payload)
        return frames.frame(Kind.DATA, flags, stream.number, payload)

    async def send(self, stream: Stream, payload: bytes) -> None:
        """Send all of ``payload`` as the peer makes room; ConnectionError if the stream ends."""
        rest = memoryview(payload)
        while rest:
            if stream.is_over:
                raise ConnectionError("the stream has ended")
            room = min(self._window, stream.window, frames.MOST_FRAME_BYTES)
            if room <= 0 or self._paused:
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.append(waiter)
                await waiter
                continue
            self.write(self.data(stream, rest[:room]))
            rest = rest[room:]

    def took(self, stream: Stream, count: int) -> None:
        """So many bytes of the stream were used: the peer may send as many more."""
        given = stream.read(count)
        if given and not stream.is_over:
            self.write(frames.window_update(stream.number, given))

    def forget(self, stream: Stream) -> None:
        """The stream is over, whatever the peer still sends on it."""
        stream.is_over = True
        self.streams.pop(stream.number, None)
        self._wake()

    def fail(self, fault: Fault, what: str) -> None:
        """End the connection and say why."""
        self.write(frames.goaway(self.last_stream, fault))
        self.close()
        self.on_fault(what)

    def close(self) -> None:
        """End the connection once everything is sent."""
        held, self._held = self._held, None
        if held:
            self.write(b"".join(held))
        if self._transport is not None:
            self._transport.close()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    # -- what comes -----------------------------------------------------------------------------

    def _take_frames(self) -> None:
        buffer = self._buffer
        if self._awaits_preface:
            if not frames.PREFACE.startswith(bytes(buffer[: len(frames.PREFACE)])):
                raise WireError(Fault.PROTOCOL_ERROR, "this is not HTTP/2")
            if len(buffer) < len(frames.PREFACE):
                return
            del buffer[: len(frames.PREFACE)]
            self._awaits_preface = False
        while len(buffer) >= frames.HEAD_BYTES:
            length, kind, flags, number = frames.head(buffer)
            if length > frames.MOST_FRAME_BYTES:
                raise WireError(Fault.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = frames.HEAD_BYTES + length
            if len(buffer) < end:
                return
            payload = bytes(buffer[frames.HEAD_BYTES : end])
            del buffer[:end]
            self._take(kind, flags, number, payload)

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._partial is not None and kind != Kind.CONTINUATION:
            raise WireError(Fault.PROTOCOL_ERROR, "a header block was broken off")
        match kind:
            case Kind.DATA:
                self._take_data(flags, number, payload)
            case Kind.HEADERS:
                block = bytearray(frames.unpadded(payload, flags, priority=True))
                self._partial = (number, flags, block)
                self._take_block(flags)
            case Kind.CONTINUATION:
                if self._partial is None or self._partial[0] != number:
                    raise WireError(Fault.PROTOCOL_ERROR, "a continuation of nothing")
                self._partial[2].extend(payload)
                self._take_block(flags)
            case Kind.WINDOW_UPDATE:
                self._widen(number, frames.word(payload) & frames.MOST_WINDOW)
            case Kind.SETTINGS:
                self._take_settings(flags, payload)
            case Kind.PING:
                if len(payload) != frames.PING_BYTES:
                    raise WireError(Fault.FRAME_SIZE_ERROR, f"a PING of {len(payload)} bytes")
                if not flags & frames.ACK:
                    self.write(frames.frame(Kind.PING, frames.ACK, 0, payload))
            case Kind.RST_STREAM:
                fault = frames.word(payload)
                stream = self.streams.get(number)
                if stream is not None:
                    self.forget(stream)
                    self.on_reset(stream, fault)
            case Kind.GOAWAY:
                self.on_goaway(frames.word(payload) & frames.MOST_WINDOW)
            case Kind.PUSH_PROMISE:
                raise WireError(Fault.PROTOCOL_ERROR, "a push, which was not allowed")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._unread += len(payload)
        if self._unread >= CONNECTION_WINDOW // 4:  # what a stream keeps its own window bounds
            self.write(frames.window_update(0, self._unread))
            self._unread = 0
        stream = self.streams.get(number)
        if stream is None:
            if number == 0 or (number > self.last_stream and not self._is_client):
                raise WireError(Fault.PROTOCOL_ERROR, "data of a stream that was not begun")
            return
        if not stream.came(len(payload)):
            raise WireError(Fault.FLOW_CONTROL_ERROR, "more data than a stream's window")
        self.on_data(stream, frames.unpadded(payload, flags), len(payload))
        if flags & frames.END_STREAM and not stream.is_over:
            self.on_end(stream)

    def _take_block(self, flags: int) -> None:
        assert self._partial is not None
        number, first_flags, block = self._partial
        if len(block) > MOST_HEADER_BYTES:
            raise WireError(Fault.ENHANCE_YOUR_CALM, "a header block without an end")
        if flags & frames.END_HEADERS:
            self._partial = None
            ended = bool(first_flags & frames.END_STREAM)
            self.on_headers(number, self._fields(bytes(block)), ended)

    def _fields(self, block: bytes) -> Fields:
        """Decode a header block. A client says the same again and again; a block that leaves the
        table as it is means the same for as long as no other changes it."""
        known = self._blocks.get(block)
        if known is not None:
            return known
        before = self._table()
        try:
            decoded = self._decoder.decode(block, raw=True)
        except hpack.HPACKError as error:
            raise WireError(Fault.COMPRESSION_ERROR, str(error)) from None
        found = tuple(
            (bytes(name).decode("latin-1"), bytes(value).decode("latin-1"))
            for name, value in decoded
        )
        after = self._table()
        if after[:2] != before[:2] or after[2] is not before[2]:
            self._blocks.clear()
        elif len(block) <= _LONGEST_KNOWN:
            if len(self._blocks) >= _KNOWN_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = found
        return found

    def _table(self) -> tuple[int, int, object]:
        """What the decoder's table is: its bound, its length, and its newest entry."""
        entries = self._decoder.header_table.dynamic_entries
        return self._decoder.header_table_size, len(entries), entries[0] if entries else None

    def _widen(self, number: int, count: int) -> None:
        if not count:
            raise WireError(Fault.PROTOCOL_ERROR, "a window made wider by nothing")
        if number == 0:
            self._window += count
            if self._window > frames.MOST_WINDOW:
                raise WireError(Fault.FLOW_CONTROL_ERROR, "the connection's window is too wide")
        elif (stream := self.streams.get(number)) is not None:
            self._widen_stream(stream, count)
        self._wake()

    def _widen_stream(self, stream: Stream, count: int) -> None:
        stream.window += count
        if stream.window > frames.MOST_WINDOW:
            raise WireError(Fault.FLOW_CONTROL_ERROR, "a stream's window is too wide")

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        for key, value in frames.read_settings(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                if value > frames.MOST_WINDOW:
                    raise WireError(Fault.FLOW_CONTROL_ERROR, "a window that is too wide")
                for stream in self.streams.values():
                    self._widen_stream(stream, value - self._initial_window)
                self._initial_window = value
        self.write(frames.frame(Kind.SETTINGS, frames.ACK, 0))
        self._wake()

    def new_stream(self, number: int, most_bytes: int) -> Stream:
        stream = Stream(number, self._initial_window, most_bytes)
        self.streams[number] = stream
        return stream

    # -- hooks ----------------------------------------------------------------------------------

    def on_headers(self, number: int, fields: Fields, ended: bool) -> None:
        """A header block came; ``ended``: nothing follows on that stream."""

    def on_data(self, stream: Stream, data: bytes, taken: int) -> None:
        """Bytes came; ``taken`` of them count for the window."""

    def on_end(self, stream: Stream) -> None:
        """The peer has sent everything."""

    def on_reset(self, stream: Stream, fault: int) -> None:
        """The peer has broken a stream off; it is forgotten already."""

    def on_lost(self, stream: Stream, why: str) -> None:
        """The connection has ended under a stream."""

    def on_goaway(self, last: int) -> None:
        """The peer takes no more streams than up to ``last``."""

    def on_fault(self, what: str) -> None:
        """The peer broke the protocol."""

    def on_closed(self) -> None:
        """The connection is gone."""
