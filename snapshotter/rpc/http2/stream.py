"""A stream and the gRPC messages on it, cut out of what comes.

A message is bounded in length, and those that nobody has taken up are by the stream's window.
"""

from __future__ import annotations

from collections import deque
from typing import Final

STREAM_WINDOW: Final = 1 << 20
"""Bytes that a peer may send on one stream before they are taken up."""
_MESSAGE_HEAD: Final = 5


class TooLongError(Exception):
    """A message is longer than we take."""


class CompressedError(Exception):
    """A message is compressed, though we said that we take none such."""


class Stream:
    """One call's stream: what may still be sent, and the whole messages that have come."""

    def __init__(self, number: int, window: int, most_bytes: int) -> None:
        self.number = number
        self.window = window
        self.messages: deque[bytes] = deque()
        self.is_over = False
        """Nothing more is sent or taken."""
        self._most_bytes = most_bytes
        self._partial = bytearray()
        self._unread = 0
        self._room = STREAM_WINDOW

    def came(self, count: int) -> bool:
        """``count`` bytes came; False: the peer was not allowed as many."""
        self._room -= count
        return self._room >= 0

    def feed(self, data: bytes) -> None:
        """Take bytes of messages; TooLongError, CompressedError."""
        partial = self._partial
        partial += data
        while len(partial) >= _MESSAGE_HEAD:
            length = int.from_bytes(partial[1:_MESSAGE_HEAD], "big")
            if partial[0]:
                raise CompressedError
            if length > self._most_bytes:
                raise TooLongError(f"a message of {length} bytes, of at most {self._most_bytes}")
            end = _MESSAGE_HEAD + length
            if len(partial) < end:
                break
            self.messages.append(bytes(partial[_MESSAGE_HEAD:end]))
            del partial[:end]

    def read(self, count: int) -> int:
        """``count`` more bytes were taken up; how many the peer may be given back now, if any."""
        self._unread += count
        if self._unread < STREAM_WINDOW // 4:
            return 0
        given, self._unread = self._unread, 0
        self._room += given
        return given


def framed(message: bytes) -> bytes:
    """A message as it stands in DATA: not compressed, with its length."""
    return b"".join((b"\0", len(message).to_bytes(4, "big"), message))
