"""An index file ↔ its form in a registry: one zstd frame, held to its plain digest and length.

What is unpacked never exceeds what the artifact promised, in length or in memory. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import zstandard

from snapshotter.errors import CorruptError
from snapshotter.indexes.artifact import Content

_LEVEL = 9
_WINDOW_LIMIT_BYTES = 128 * 1024**2
_PIECE_BYTES = 512
"""What is unpacked at once: zstd makes at most 16 MiB of it."""


def pack(data: bytes | memoryview) -> bytes:
    """The packed form: the same for the same bytes (under the same libzstd)."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    return bytes(compressor.compress(data))


class Unpacker:
    """Unpacks a stream; never gives more than was promised. ``write`` takes the plain bytes."""

    def __init__(self, plain: Content, write: Callable[[bytes], object], what: str) -> None:
        self._plain = plain
        self._write = write
        self._what = what
        self._hash = hashlib.new(plain.digest.algorithm)
        self._bytes = 0
        self._frame = zstandard.ZstdDecompressor(
            max_window_size=_WINDOW_LIMIT_BYTES
        ).decompressobj()

    def feed(self, packed: bytes) -> None:
        """The next packed bytes. CorruptError if they can't be what was promised."""
        for at in range(0, len(packed), _PIECE_BYTES):
            self._take(packed[at : at + _PIECE_BYTES])

    def _take(self, packed: bytes) -> None:
        if self._frame.eof:
            raise CorruptError(f"{self._what}: bytes behind its end")
        try:
            plain = self._frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{self._what}: not zstd ({error})") from None
        self._bytes += len(plain)
        if self._bytes > self._plain.size_bytes:
            raise CorruptError(f"{self._what}: longer than the {self._plain.size_bytes} promised")
        self._hash.update(plain)
        self._write(plain)

    def finish(self) -> None:
        """CorruptError unless all came, and it is what was promised."""
        if not self._frame.eof or self._frame.unused_data:
            raise CorruptError(f"{self._what}: it is cut, or has bytes behind its end")
        if (
            self._bytes != self._plain.size_bytes
            or self._hash.hexdigest() != self._plain.digest.hex
        ):
            raise CorruptError(f"{self._what}: it is not the index that its artifact promises")
