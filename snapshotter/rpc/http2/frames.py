"""HTTP/2's frames (RFC 9113) and the header fields in them, as bytes; no connection, no stream.

Fields are written without HPACK's tables and without Huffman codes (RFC 7541, 6.2.2), so that a
block never depends on what was sent before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final
from urllib.parse import quote

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
MOST_FRAME_BYTES: Final = 16_384
"""The least that everybody must take, and the most that we do."""
PING_BYTES: Final = 8
USUAL_WINDOW: Final = 65_535
MOST_WINDOW: Final = 2**31 - 1

_HEAD = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")
_STREAM_MASK = 0x7FFF_FFFF


class Kind(IntEnum):
    """What a frame is."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


ACK: Final = 0x1
"""Of SETTINGS and PING; the other flags are of DATA and HEADERS."""
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20


class Setting(IntEnum):
    """The settings that matter here."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Fault(IntEnum):
    """Why a stream or a connection ends (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class WireError(Exception):
    """The peer broke the protocol: the connection can't go on."""

    def __init__(self, fault: Fault, what: str) -> None:
        super().__init__(what)
        self.fault = fault


def head(raw: bytes | bytearray) -> tuple[int, int, int, int]:
    """(length, kind, flags, stream) of the frame at the start of ``raw``."""
    high, low, kind, flags, stream = _HEAD.unpack_from(raw)
    return high << 8 | low, kind, flags, stream & _STREAM_MASK


def frame(kind: Kind, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    """One frame."""
    length = len(payload)
    return b"".join((_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream), payload))


def headers(stream: int, block: bytes, flags: int = 0) -> bytes:
    """A header block in as many frames as it takes."""
    parts = [block[at : at + MOST_FRAME_BYTES] for at in range(0, len(block), MOST_FRAME_BYTES)]
    last = len(parts) - 1
    return b"".join(
        frame(
            Kind.CONTINUATION if number else Kind.HEADERS,
            (0 if number else flags) | (END_HEADERS if number == last else 0),
            stream,
            part,
        )
        for number, part in enumerate(parts)
    )


def settings(values: Iterable[tuple[Setting, int]]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values))


def window_update(stream: int, count: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, _WORD.pack(count))


def reset(stream: int, fault: Fault) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream, _WORD.pack(fault))


def goaway(last_stream: int, fault: Fault) -> bytes:
    return frame(Kind.GOAWAY, 0, 0, struct.pack(">II", last_stream, fault))


def word(payload: bytes) -> int:
    """The 32 bits that a payload begins with; WireError where there are fewer."""
    if len(payload) < _WORD.size:
        raise WireError(Fault.FRAME_SIZE_ERROR, "a frame is shorter than what it must hold")
    return int(_WORD.unpack_from(payload)[0])


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    if len(payload) % _SETTING.size:
        raise WireError(Fault.FRAME_SIZE_ERROR, "SETTINGS of no whole number of settings")
    return [(key, value) for key, value in _SETTING.iter_unpack(payload)]


def unpadded(payload: bytes, flags: int, *, priority: bool = False) -> bytes:
    """What is left of a payload without its padding and, of HEADERS, its priority."""
    start = end = 0
    if flags & PADDED:
        if not payload:
            raise WireError(Fault.FRAME_SIZE_ERROR, "padding of no length")
        start, end = 1, payload[0]
    if priority and flags & PRIORITY:
        start += 5
    if start + end > len(payload):
        raise WireError(Fault.PROTOCOL_ERROR, "a frame holds more padding than bytes")
    return payload[start : len(payload) - end]


def fields(pairs: Iterable[tuple[str, str]]) -> bytes:
    """A header block of ``pairs``."""
    return b"".join(
        b"".join((b"\0", _text(name.encode("ascii")), _text(value.encode("latin-1", "replace"))))
        for name, value in pairs
    )


def status_text(message: str) -> str:
    """A status message as gRPC puts it into a header (percent-encoded UTF-8)."""
    return quote(message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")


def _text(value: bytes) -> bytes:
    length = len(value)
    if length < 0x7F:
        return bytes((length,)) + value
    out, rest = bytearray((0x7F,)), length - 0x7F
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out) + value
