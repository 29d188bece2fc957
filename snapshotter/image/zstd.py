"""The stream of a zstd layer: frames of all kinds, cut into blocks here, decoded by libzstd.

Walking the frames (RFC 8878, section 3.1) gives what the library does not tell: where a frame
ends, so that it can be a restart point, and pieces of input that give at most 128 KiB each, so
that a hostile blob cannot make one call swell. The library still judges every byte.
"""

from __future__ import annotations

from collections.abc import Callable

import zstandard

from snapshotter.errors import RefusedError
from snapshotter.image.detect import ZSTD_MAGIC, ZSTD_SKIPPABLE
from snapshotter.image.stream import RestartPoint

MAX_WINDOW_BYTES = 128 * 1024 * 1024
"""The largest window that is accepted: what the zstd program decodes unless told otherwise."""

_MAX_BLOCK_BYTES = 128 * 1024
_MAGIC_BYTES = 4
_BLOCK_HEADER_BYTES = 3
_CHECKSUM_BYTES = 4
_RLE, _RESERVED = 1, 3
_STATE_BYTES = 256 * 1024
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)


class ZstdStream:
    """A PlainStream over any number of zstd and skippable frames."""

    def __init__(
        self,
        *,
        spacing_bytes: int = 0,
        chunk_bytes: int = 0,
        at: RestartPoint | None = None,
        max_window_bytes: int = MAX_WINDOW_BYTES,
    ) -> None:
        self.in_offset = 0 if at is None else at.in_offset
        self.out_offset = 0 if at is None else at.out_offset
        self._spacing_bytes = spacing_bytes
        self._chunk_bytes = chunk_bytes
        self._max_window_bytes = max_window_bytes
        self._ends: list[int] = []
        self._points: list[RestartPoint] = []
        self._last_point = self.out_offset
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=max_window_bytes)
        self._frame = self._decompressor.decompressobj()
        self._frame_offset = self.in_offset
        self._checksum = False
        self._last_block = False
        self._window_bytes = 0
        self._pending = memoryview(b"")
        self._skip_bytes = 0
        self._held = bytearray()
        self._need = 0
        self._then: Callable[[bytes], None] = self._on_magic
        self._expect(_MAGIC_BYTES, self._on_magic)

    def step(self, data: memoryview, out: memoryview) -> tuple[int, int]:
        consumed = produced = 0
        while True:
            produced += self._drain(out[produced:])
            if produced == len(out) or consumed == len(data):
                return consumed, produced
            count = self._consume(data[consumed:])
            consumed += count
            self.in_offset += count
            if not self._skip_bytes and len(self._held) == self._need:
                unit, self._held = bytes(self._held), bytearray()
                self._then(unit)

    def take_ends(self) -> list[int]:
        ends, self._ends = self._ends, []
        return ends

    def take_points(self) -> list[RestartPoint]:
        points, self._points = self._points, []
        return points

    def finish(self) -> None:
        begun = self._then != self._on_magic or self._held or self._skip_bytes
        if begun:
            raise self._fault("the blob ends inside it")

    def memory_bytes(self) -> int:
        return self._window_bytes + _STATE_BYTES

    def _drain(self, out: memoryview) -> int:
        count = min(len(out), len(self._pending))
        if not count:
            return 0
        out[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        if self._chunk_bytes:
            before = self.out_offset // self._chunk_bytes
            ended = (self.out_offset + count) // self._chunk_bytes - before
            self._ends.extend([self.in_offset] * ended)
        self.out_offset += count
        return count

    def _consume(self, data: memoryview) -> int:
        if self._skip_bytes:
            count = min(self._skip_bytes, len(data))
            self._skip_bytes -= count
            return count
        count = min(self._need - len(self._held), len(data))
        self._held += data[:count]
        return count

    def _expect(self, count: int, then: Callable[[bytes], None]) -> None:
        self._need, self._then = count, then

    def _fault(self, what: str) -> RefusedError:
        return RefusedError(f"zstd frame at compressed byte {self._frame_offset}: {what}")

    def _decompress(self, data: bytes) -> None:
        try:
            self._pending = memoryview(self._frame.decompress(data))
        except zstandard.ZstdError as error:
            raise self._fault(str(error)) from None

    def _on_magic(self, magic: bytes) -> None:
        self._frame_offset = self.in_offset - _MAGIC_BYTES
        if magic == ZSTD_MAGIC:
            self._expect(1, self._on_descriptor)
        elif int.from_bytes(magic, "little") in ZSTD_SKIPPABLE:
            self._expect(4, self._on_skippable)
        else:
            raise self._fault(f"no zstd frame begins with {magic.hex()}")

    def _on_skippable(self, length: bytes) -> None:
        self._skip_bytes = int.from_bytes(length, "little")
        self._expect(_MAGIC_BYTES, self._on_magic)

    def _on_descriptor(self, descriptor: bytes) -> None:
        flags = descriptor[0]
        single = flags >> 5 & 1
        content_size_bytes = _CONTENT_SIZE_BYTES[flags >> 6] or single
        self._checksum = bool(flags >> 2 & 1)
        if flags >> 3 & 1:
            raise self._fault("a reserved bit of its header is set")
        dictionary_id_bytes = _DICTIONARY_ID_BYTES[flags & 3]

        def on_header(header: bytes) -> None:
            self._window_bytes = _window_bytes(header[0], header[-content_size_bytes:], single)
            dictionary_id = header[1 - single : 1 - single + dictionary_id_bytes]
            if any(dictionary_id):
                raise self._fault(f"needs the dictionary {dictionary_id[::-1].hex()}")
            self._begin_frame(ZSTD_MAGIC + descriptor + header)

        self._expect((1 - single) + dictionary_id_bytes + content_size_bytes, on_header)

    def _begin_frame(self, header: bytes) -> None:
        if self._window_bytes > self._max_window_bytes:
            raise self._fault(
                f"needs a window of {self._window_bytes} bytes, at most {self._max_window_bytes} "
                "are accepted"
            )
        since = self.out_offset - self._last_point
        if self._spacing_bytes and since >= self._spacing_bytes:
            self._points.append(RestartPoint(self._frame_offset, self.out_offset))
            self._last_point = self.out_offset
        self._frame = self._decompressor.decompressobj()
        self._decompress(header)
        self._expect(_BLOCK_HEADER_BYTES, self._on_block_header)

    def _on_block_header(self, raw: bytes) -> None:
        header = int.from_bytes(raw, "little")
        kind, size = header >> 1 & 3, header >> 3
        self._last_block = bool(header & 1)
        if kind == _RESERVED or size > _MAX_BLOCK_BYTES:
            raise self._fault(f"a block of kind {kind} and {size} bytes cannot be")
        content_bytes = 1 if kind == _RLE else size
        if content_bytes:
            self._expect(content_bytes, lambda content: self._on_block(raw + content))
        else:
            self._on_block(raw)

    def _on_block(self, block: bytes) -> None:
        self._decompress(block)
        if not self._last_block:
            self._expect(_BLOCK_HEADER_BYTES, self._on_block_header)
        elif self._checksum:
            self._expect(_CHECKSUM_BYTES, self._on_checksum)
        else:
            self._end_frame()

    def _on_checksum(self, checksum: bytes) -> None:
        self._decompress(checksum)
        self._end_frame()

    def _end_frame(self) -> None:
        if not self._frame.eof:
            raise self._fault("is shorter than its header says")
        self._expect(_MAGIC_BYTES, self._on_magic)


def _window_bytes(window_descriptor: int, content_size: bytes, single_segment: int) -> int:
    """How far back the frame may reach (RFC 8878, sections 3.1.1.1.2 and 3.1.1.1.4)."""
    if single_segment:
        return int.from_bytes(content_size, "little") + (256 if len(content_size) == 2 else 0)
    base = 1 << (10 + (window_descriptor >> 3))
    return base + base // 8 * (window_descriptor & 7)
