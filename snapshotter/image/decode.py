"""From the chunks that are wanted to the compressed ranges that give them, and back to chunks.

Pure but for reading a checkpoint's window: ``plan`` says which ranges to fetch, a Decoder turns
their bytes into whole chunks, a DecoderPool keeps decoders that may be continued. Whether a chunk
is right is for the caller to check against its digest: a decoder only notices what cannot be.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ioengine.inflate import LOOKAHEAD_BYTES
from snapshotter.content import Compression, Digest
from snapshotter.errors import CorruptError, InvalidArgumentError, RefusedError
from snapshotter.image.gzip import GzipStream
from snapshotter.image.index import LayerIndex
from snapshotter.image.plain import StoredStream
from snapshotter.image.stream import PlainStream, RestartPoint
from snapshotter.image.zstd import ZstdStream


@dataclass(frozen=True, slots=True)
class Span:
    """Compressed bytes [in_offset, in_end) that give the chunks first_chunk to last_chunk.

    All of these come out whole, in order. ``wanted_chunk`` is the first that was asked for: those
    before it come out on the way from ``checkpoint`` (None for a plain layer), and the last ones
    may come out of the same bytes unasked.
    """

    in_offset: int
    in_end: int
    checkpoint: int | None
    first_chunk: int
    wanted_chunk: int
    last_chunk: int

    @property
    def length_bytes(self) -> int:
        """How many compressed bytes must be fetched."""
        return self.in_end - self.in_offset


def plan(
    index: LayerIndex,
    chunks: Iterable[int],
    *,
    gap_bytes: int = 0,
    limit_bytes: int | None = None,
) -> list[Span]:
    """The fewest compressed ranges that give ``chunks``, in the order of the blob.

    Ranges that overlap, touch, or lie no more than ``gap_bytes`` apart become one, unless it would
    grow over ``limit_bytes`` where it could be cut at a checkpoint. The dearest case is a layer
    with one checkpoint: its spans begin at 0.
    """
    spans: list[Span] = []
    checkpoint: int | None = None
    for chunk in sorted(set(chunks)):
        alone = _span_of(index, chunk)
        last = spans[-1] if spans else None
        if last is not None and _join(last, checkpoint, alone, gap_bytes, limit_bytes):
            spans[-1] = replace(last, in_end=max(last.in_end, alone.in_end), last_chunk=chunk)
        else:
            spans.append(alone)
        checkpoint = alone.checkpoint
    return [_whole(index, span) for span in spans]


def _span_of(index: LayerIndex, chunk: int) -> Span:
    in_end = index.chunk_input_end(chunk)
    offset = index.chunk_extent(chunk).offset
    if index.compression is Compression.PLAIN:
        return Span(offset, in_end, None, chunk, chunk, chunk)
    point = index.nearest_checkpoint(offset)
    first = -(-point.out_offset // index.chunk_bytes)
    return Span(point.in_offset, in_end, point.number, first, chunk, chunk)


def _whole(index: LayerIndex, span: Span) -> Span:
    """The span with all chunks that its bytes give: a zstd block may end several."""
    last = span.last_chunk
    while last + 1 < index.chunk_count and index.chunk_input_end(last + 1) <= span.in_end:
        last += 1
    ahead = LOOKAHEAD_BYTES if index.compression is Compression.GZIP else 0
    return replace(span, last_chunk=last, in_end=min(span.in_end + ahead, index.blob_bytes))


def _join(
    last: Span, checkpoint: int | None, alone: Span, gap_bytes: int, limit_bytes: int | None
) -> bool:
    """Whether ``alone`` goes into ``last``, whose last chunk comes from ``checkpoint``."""
    if checkpoint is not None and checkpoint == alone.checkpoint:
        return True
    if limit_bytes is not None and alone.in_end - last.in_offset > limit_bytes:
        return False
    return alone.in_offset <= last.in_end + gap_bytes


@dataclass(slots=True)
class Run:
    """Whole chunks one behind the other in ``memory``, and perhaps a part of the next one.

    ``memory`` is a multiple of ``chunk_bytes`` long; only a view's last chunk may be shorter.
    """

    memory: memoryview
    chunk_bytes: int
    first: int = 0
    count: int = 0
    filled_bytes: int = 0
    is_full: bool = False


class Decoder:
    """Turns a span's compressed bytes, given in order and in any pieces, into whole chunks.

    Used by one thread at a time. After an error it must be thrown away.
    """

    def __init__(self, index: LayerIndex, span: Span, window: bytes | None = None) -> None:
        """Begin at the span's checkpoint; nothing is read or set up before the first bytes.

        ``window`` is the checkpoint's as it is stored; None: it is in the windows file.
        """
        self.index = index
        self.span = span
        self.next_chunk = span.first_chunk
        """The number of the next chunk that comes out."""
        self.failed = False
        self._window = window
        self._opened: PlainStream | None = None
        self._chunk = bytearray()

    @property
    def in_offset(self) -> int:
        """Compressed offset of the next byte to be fed."""
        return self.span.in_offset if self._opened is None else self._opened.in_offset

    @property
    def done(self) -> bool:
        """Whether the span's last chunk has come out."""
        return self.next_chunk > self.span.last_chunk

    @property
    def memory_bytes(self) -> int:
        """About how much memory this decoder holds."""
        held = 0 if self._opened is None else self._opened.memory_bytes()
        return held + len(self._chunk)

    @property
    def is_open(self) -> bool:
        """Whether it was set up: before that there is nothing in it to be continued."""
        return self._opened is not None

    def open(self) -> None:
        """Read the checkpoint's window and set up; done by the first bytes, if not before.

        Raises NotFoundError if the windows file is needed and missing, RefusedError if it is torn.
        """
        if self._opened is None:
            self._opened = _stream_at(self.index, self.span, self._window)
            self._window = None
            self._chunk = bytearray(self.index.chunk_bytes)

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, bytes]]:
        """Give the compressed bytes at ``in_offset``: the chunks that are now whole.

        As ``chunks``, which a caller should prefer whose memory matters: layers of zeros come out
        a thousand times as long as they went in.
        """
        return list(self.chunks(data))

    def chunks(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[int, bytes]]:
        """Give the compressed bytes at ``in_offset``: each chunk as soon as it is whole.

        ``data`` must stay as it is until the iterator ends, and no iterator may be left half-way.
        Bytes behind what the span needs are left alone (``in_offset`` tells). Raises CorruptError
        if the bytes cannot be this layer's, or as ``open`` does.
        """
        self.open()
        try:
            yield from self._chunks(memoryview(data))
        except RefusedError as error:
            self.failed = True
            raise CorruptError(
                f"bytes received for layer {self.index.layer} do not decode: {error}"
            ) from error

    def fill(self, data: memoryview, run: Run) -> memoryview:
        """Give the compressed bytes at ``in_offset``; the chunks come to lie in ``run``.

        Ends when that is full, the span's last chunk is out or all of ``data`` is used: what is
        left of it. Of a full run that may be nothing, and more come out of that all the same.
        Raises as ``chunks``.
        """
        self.open()
        try:
            return self._fill(data, run)
        except RefusedError as error:
            self.failed = True
            raise CorruptError(
                f"bytes received for layer {self.index.layer} do not decode: {error}"
            ) from error

    def take_back(self, run: Run) -> None:
        """The part of a chunk at the end of ``run``: the chunk may be finished elsewhere."""
        begins = run.count * run.chunk_bytes
        part = run.filled_bytes - begins
        if part > 0:
            self._chunk[:part] = run.memory[begins : run.filled_bytes]
            run.filled_bytes = begins

    def extend(self, span: Span) -> None:
        """Go on to another span, whose wanted chunks all lie ahead of this decoder.

        ``span`` then holds what is left to be fetched. Raises InvalidArgumentError if the
        decoder is past them.
        """
        past = span.wanted_chunk < self.next_chunk or span.in_end <= self.in_offset
        if self.failed or past:
            raise InvalidArgumentError(
                f"a decoder at chunk {self.next_chunk} of {self.index.layer}, compressed byte "
                f"{self.in_offset}, cannot go back to chunk {span.wanted_chunk}"
            )
        self.span = replace(span, in_offset=self.in_offset, first_chunk=self.next_chunk)

    def _fill(self, data: memoryview, run: Run) -> memoryview:
        stream, size = self._opened, run.chunk_bytes
        assert stream is not None
        last = self.index.chunk_extent(self.span.last_chunk).end
        while not self.done and not run.is_full:
            number, part = divmod(stream.out_offset, size)
            if number < self.next_chunk:  # the tail of one that began before
                consumed, produced = stream.step(data, memoryview(self._chunk)[part:])
                data = data[consumed:]
                if part + produced < size:
                    break
                continue
            if not run.filled_bytes:
                run.first, run.filled_bytes = number, part
                run.memory[:part] = memoryview(self._chunk)[:part]
            room = min(len(run.memory), last - run.first * size)
            consumed, produced = stream.step(data, run.memory[run.filled_bytes : room])
            data = data[consumed:]
            run.filled_bytes += produced
            ended = run.filled_bytes == room
            run.count = -(-room // size) if ended else run.filled_bytes // size
            run.is_full = ended and room == len(run.memory)
            self.next_chunk = run.first + run.count
            if not ended:
                break
        if not run.is_full:
            self._check_ahead(stream)
        return data

    def _chunks(self, data: memoryview) -> Iterator[tuple[int, bytes]]:
        stream, size = self._opened, self.index.chunk_bytes
        assert stream is not None
        while not self.done:
            number, filled = divmod(stream.out_offset, size)
            length = self.index.chunk_extent(number).length
            consumed, produced = stream.step(data, memoryview(self._chunk)[filled:length])
            data = data[consumed:]
            if filled + produced < length:
                break
            if number == self.next_chunk:  # else it is the tail of one that began before
                self.next_chunk += 1
                yield number, bytes(memoryview(self._chunk)[:length])
        self._check_ahead(stream)

    def _check_ahead(self, stream: PlainStream) -> None:
        if not self.done and stream.in_offset >= self.span.in_end:
            raise RefusedError(
                f"chunk {self.next_chunk} should be complete at compressed byte "
                f"{self.span.in_end} and is not"
            )


def _stream_at(index: LayerIndex, span: Span, window: bytes | None) -> PlainStream:
    if span.checkpoint is None:
        return StoredStream(at=RestartPoint(span.in_offset, span.in_offset))
    point = index.restart_point(index.checkpoint(span.checkpoint), window)
    if index.compression is Compression.GZIP:
        return GzipStream(at=point)
    return ZstdStream(at=point)


class DecoderPool:
    """Decoders that reached their span's end and may be continued, least recently used dropped.

    A reader that goes through a layer chunk by chunk would otherwise inflate from the same
    checkpoint again and again. Bounded by number and by memory; safe to use from any thread.
    """

    def __init__(self, *, max_decoders: int = 64, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_decoders = max_decoders
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Decoder] = OrderedDict()
        self._bytes = 0

    def find(self, index: LayerIndex, span: Span) -> Decoder | None:
        """A kept decoder that can go on to ``span``, the caller's alone from now on.

        What must be fetched and fed is the *decoder's* ``span``. Quick: nothing is read.
        """
        with self._lock:
            nearest = max(
                (kept for kept in self._kept.values() if _serves(kept, index, span)),
                key=lambda kept: kept.in_offset,
                default=None,
            )
            if nearest is not None:
                self._remove(id(nearest))
        if nearest is not None:
            nearest.extend(span)
        return nearest

    def take(self, index: LayerIndex, span: Span) -> Decoder:
        """As find(), or else a new one."""
        return self.find(index, span) or Decoder(index, span)

    def give(self, decoder: Decoder) -> None:
        """Hand a decoder back for reuse; it is dropped if it failed or nothing lies ahead."""
        index = decoder.index
        plain = index.compression is Compression.PLAIN
        over = decoder.failed or decoder.next_chunk >= index.chunk_count
        if over or plain or not decoder.is_open:
            return
        with self._lock:
            self._kept[id(decoder)] = decoder
            self._bytes += decoder.memory_bytes
            while len(self._kept) > self._max_decoders or self._bytes > self._max_bytes:
                self._remove(next(iter(self._kept)))

    def discard(self, layer: Digest) -> None:
        """Drop what is kept for ``layer``."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.index.layer == layer]:
                self._remove(key)

    def __len__(self) -> int:
        return len(self._kept)

    def _remove(self, key: int) -> None:
        self._bytes -= self._kept.pop(key).memory_bytes


def _serves(kept: Decoder, index: LayerIndex, span: Span) -> bool:
    """Whether ``kept`` lies between the span's checkpoint and its first wanted chunk.

    One that has read all of the span would leave nothing to fetch, and is passed over.
    """
    same = kept.index.layer == index.layer and kept.index.chunk_bytes == index.chunk_bytes
    between = span.in_offset <= kept.in_offset < span.in_end
    return same and between and kept.next_chunk <= span.wanted_chunk
