"""Takes GOAWAY out of a stream of HTTP/2 frames (RFC 9113, sections 4.1 and 6.8). Pure.

A server that sends GOAWAY in good order, as each does now and then, goes on with the streams it has
begun. The protocol library ends the whole connection at that frame, so it never gets to see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h2.exceptions import FrameTooLargeError

_HEAD_BYTES = 9
_GOAWAY = 0x7
_LEAST_GOAWAY_BYTES = 8
_MOST_GOAWAY_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class GoAway:
    """No stream beyond ``last_stream`` was begun, or will be; ``code`` 0: nothing is wrong."""

    last_stream: int
    code: int


class FrameSplitter:
    """Gives on what comes, in the same order, with each GOAWAY as a value of its own."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = b""
        self._passing = 0

    def split(self, data: bytes) -> Iterator[bytes | GoAway]:
        """Bytes to pass on, and GoAway; a piece of a frame's head is held until it is whole.

        Raises FrameTooLargeError at the head of a frame of more than ``most_bytes``, of which
        nobody should wait for the end.
        """
        if self._held:
            data, self._held = self._held + data, b""
        at = min(self._passing, len(data))
        self._passing -= at
        start = 0
        while at < len(data):
            if len(data) - at < _HEAD_BYTES:
                self._held = data[at:]
                break
            length = int.from_bytes(data[at : at + 3], "big")
            if length > self._most_bytes:
                raise FrameTooLargeError(f"a frame of {length} bytes, if it is one at all")
            end = at + _HEAD_BYTES + length
            if data[at + 3] == _GOAWAY and _LEAST_GOAWAY_BYTES <= length <= _MOST_GOAWAY_BYTES:
                if end > len(data):
                    self._held = data[at:]
                    break
                if at > start:
                    yield data[start:at]
                yield _parse(data[at + _HEAD_BYTES : end])
                start = end
            elif end > len(data):
                self._passing = end - len(data)
            at = end
        end = len(data) - len(self._held)
        if end > start:
            yield data[start:end]


def _parse(payload: bytes) -> GoAway:
    last_stream = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
    return GoAway(last_stream, int.from_bytes(payload[4:8], "big"))
