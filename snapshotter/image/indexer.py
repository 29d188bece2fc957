"""Reading a layer once, as a stream, and keeping all that later reads of it need.

Everything is taken in one pass: the blob's digest, the plain bytes for the view, their digest,
the tar's entries, chunk digests, checkpoints. Nothing counts until ``finish`` found both digests
right; until then the caller must show none of the bytes that the sink was given.

Decoding runs in the caller's thread, whole digests in a second one, and chunk digests, scanning and
the sink in a third: each of them takes about as long as the others.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

from snapshotter.content import CHUNK_BYTES, Compression, Digest
from snapshotter.errors import CorruptError, InvalidArgumentError, RefusedError, restated
from snapshotter.image.checkpoints import Checkpoints, Passed
from snapshotter.image.detect import DETECT_BYTES, detect
from snapshotter.image.gzip import GzipStream, trimmed
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_writer import IndexDraft, WindowsWriter, index_path, write_index
from snapshotter.image.limits import ScanLimits
from snapshotter.image.plain import StoredStream
from snapshotter.image.scan import LayerScanner, TarLayerScanner
from snapshotter.image.stream import PlainStream, RestartPoint
from snapshotter.image.zstd import MAX_WINDOW_BYTES, ZstdStream

Sink = Callable[[int, memoryview], None]
"""Takes plain bytes at an offset, in order; the memory is its own only during the call."""

_BLOCK_BYTES = 1024 * 1024
_MAX_BLOCKS = 8
_PIECE_BYTES = 64 * 1024
_MIN_SPACING_BYTES = 4096
_CHUNK_SIZES = tuple(1 << power for power in range(12, 21))  # each divides a block
_INLINE_BYTES = 16 * 1024
"""Less than this is hashed at once: handing it to the helper would cost more."""


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """What a layer may cost, and how densely it is indexed.

    A layer is refused as a bomb if it unpacks to more than ``max_view_bytes``, or to more than
    ``max_ratio`` times its stored bytes once that is over ``bomb_floor_bytes``. A zstd frame may
    need a window of ``max_zstd_window_bytes``. Checkpoints are ``spacing_bytes`` of plain bytes
    apart. ``scan`` bounds the tar.
    """

    max_view_bytes: int = 512 * 1024**3
    max_ratio: int = 200
    bomb_floor_bytes: int = 4 * 1024**3
    max_zstd_window_bytes: int = MAX_WINDOW_BYTES
    spacing_bytes: int = 256 * 1024
    chunk_bytes: int = CHUNK_BYTES
    scan: ScanLimits = field(default_factory=ScanLimits)


class LayerIndexer:
    """One pass over one layer: ``feed`` its stored bytes in order, then ``finish``.

    A fault in the bytes is kept until ``finish``, because it is a refusal only if the blob's
    digest is right, and a broken transfer (CorruptError, worth another try) if it is not;
    ``fault`` shows it earlier. Used by one thread at a time; ``close`` in any case.
    """

    def __init__(
        self,
        layer: Digest,
        diff_id: Digest | None,
        *,
        blob_bytes: int,
        sink: Sink | None,
        directory: Path,
        limits: IndexLimits | None = None,
        scanner: LayerScanner | None = None,
    ) -> None:
        """Index ``layer``, promised to have ``blob_bytes`` and to unpack to ``diff_id``.

        With None as ``diff_id`` the plain bytes name themselves. The index appears in
        ``directory``, which must exist. ``scanner`` reads the plain bytes, as tar by default.
        """
        self._limits = limits or IndexLimits()
        spacing, chunk_bytes = self._limits.spacing_bytes, self._limits.chunk_bytes
        if spacing < _MIN_SPACING_BYTES or chunk_bytes not in _CHUNK_SIZES:
            raise InvalidArgumentError(
                f"checkpoints every {spacing} bytes and chunks of {chunk_bytes}: the least spacing "
                f"is {_MIN_SPACING_BYTES}, a chunk is a power of two from 4 KiB to 1 MiB"
            )
        self.layer = layer
        self.diff_id = diff_id
        self.blob_bytes = blob_bytes
        self.received_bytes = 0
        self.fault: RefusedError | None = None
        self._sink = sink
        self._path = index_path(directory, layer)
        self._scanner: LayerScanner = scanner or TarLayerScanner(self._limits.scan)
        self._windows = WindowsWriter(self._path.with_suffix(".win"))
        self._blob_hash = hashlib.new(layer.algorithm)
        self._plain_hash = hashlib.new(diff_id.algorithm if diff_id else "sha256")
        self._compression = Compression.PLAIN
        self._stream: PlainStream | None = None
        self._held = bytearray()
        self._ends: list[int] = []
        self._chunk_digests = bytearray()
        self._points = Checkpoints()
        self._passed: list[Future[None]] = []
        self._last_point = 0
        self._longest_run = 0
        self._block = bytearray(_BLOCK_BYTES)
        self._filled = 0
        self._spare: list[bytearray] = []
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ember-index")
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ember-digest")
        self._pending: deque[tuple[list[Future[None]], bytearray | None]] = deque()

    @property
    def view_bytes(self) -> int:
        """Plain bytes that came out so far."""
        return 0 if self._stream is None else self._stream.out_offset

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next stored bytes; they are the caller's again when this returns.

        Raises CorruptError if the blob is longer than promised, and what the sink raises.
        """
        view = memoryview(data)
        self.received_bytes += len(view)
        if self.received_bytes > self.blob_bytes:
            raise CorruptError(
                f"layer {self.layer} is longer than the {self.blob_bytes} bytes that its manifest "
                "promises"
            )
        hashing = None
        if len(view) < _INLINE_BYTES:
            self._blob_hash.update(view)
        else:
            hashing = self._hasher.submit(self._blob_hash.update, view)
        try:
            if self.fault is None:
                self._regroup(view)
        except RefusedError as fault:
            self.fault = self.fault or restated(fault)
        finally:
            if hashing is not None:
                hashing.result()

    def finish(self) -> LayerIndex:
        """Verify everything and write the index durably: the index, opened.

        Raises CorruptError if the bytes are not the layer's (try again, elsewhere), RefusedError
        if they are and cannot be accepted, NoSpaceError.
        """
        try:
            return self._finish()
        finally:
            self.close()

    def close(self) -> None:
        """Give up whatever is unfinished and remove its traces; harmless when repeated."""
        for thread in (self._worker, self._hasher):
            thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._windows.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # The caller's thread: decoding.

    def _regroup(self, data: memoryview) -> None:
        """Decode in pieces that lie at fixed offsets, so that an index is a function of its blob.

        Where a chunk is said to end depends a little on where the decoder's input was cut.
        """
        while data:
            if not self._held and len(data) >= _PIECE_BYTES:
                self._decode(data[:_PIECE_BYTES])
                data = data[_PIECE_BYTES:]
                continue
            count = _PIECE_BYTES - len(self._held)
            self._held += data[:count]
            data = data[count:]
            if len(self._held) == _PIECE_BYTES:
                held, self._held = self._held, bytearray()
                self._decode(memoryview(held))

    def _decode(self, data: memoryview) -> None:
        if self._stream is None:
            self._stream = self._open_stream(bytes(data[:DETECT_BYTES]))
            self._add_point(RestartPoint(0, 0))
        stream, piece = self._stream, data
        while True:
            room = memoryview(self._block)[self._filled :]
            consumed, produced = stream.step(data, room)
            data = data[consumed:]
            self._filled += produced
            self._ends.extend(stream.take_ends())
            for point in stream.take_points():
                self._add_point(point)
            self._check_bomb(stream)
            if self._filled < _BLOCK_BYTES:
                break
            self._pass_block(stream.out_offset)
        self._pass_points(self._points.fed(piece, stream.out_offset))

    def _open_stream(self, prefix: bytes) -> PlainStream:
        self._compression = detect(prefix, str(self.layer))
        spacing, chunk_bytes = self._limits.spacing_bytes, self._limits.chunk_bytes
        if self._compression is Compression.GZIP:
            return GzipStream(spacing_bytes=spacing, chunk_bytes=chunk_bytes)
        if self._compression is Compression.ZSTD:
            return ZstdStream(
                spacing_bytes=spacing,
                chunk_bytes=chunk_bytes,
                max_window_bytes=self._limits.max_zstd_window_bytes,
            )
        return StoredStream(chunk_bytes=chunk_bytes)

    def _add_point(self, point: RestartPoint) -> None:
        if self._compression is Compression.PLAIN:
            return
        self._longest_run = max(self._longest_run, point.out_offset - self._last_point)
        self._last_point = point.out_offset
        self._points.add(point)

    def _pass_points(self, points: Iterable[Passed]) -> None:
        self._passed += [self._worker.submit(self._take_point, *passed) for passed in points]

    def _check_bomb(self, stream: PlainStream) -> None:
        limits = self._limits
        allowed = max(limits.bomb_floor_bytes, limits.max_ratio * stream.in_offset)
        if stream.out_offset > min(allowed, limits.max_view_bytes):
            raise RefusedError(
                f"{stream.in_offset} stored bytes unpack to more than {stream.out_offset - 1}: "
                f"taken for a decompression bomb (more than {limits.max_ratio} times its size, or "
                f"than {limits.max_view_bytes} bytes)"
            )

    def _pass_block(self, end: int) -> None:
        block, filled = self._block, self._filled
        works, self._passed = self._passed, []
        works.append(self._worker.submit(self._take_block, block, filled, end - filled))
        if not self._named_alike():
            works.append(self._hasher.submit(self._plain_hash.update, memoryview(block)[:filled]))
        self._await(works, block)
        self._block = self._spare.pop() if self._spare else bytearray(_BLOCK_BYTES)
        self._filled = 0

    def _await(self, works: list[Future[None]], block: bytearray | None = None) -> None:
        """Note what helpers do, with the ``block`` that it needs; wait while that is too much.

        Raises what they raised.
        """
        self._pending.append((works, block))
        while len(self._pending) >= _MAX_BLOCKS:
            self._settle_one()

    def _settle_one(self) -> None:
        works, block = self._pending.popleft()
        try:
            wait(works)
            for work in works:
                work.result()
        finally:
            del works  # their error, if there is one, has come through this frame
        if block is not None:
            self._spare.append(block)

    # The helper thread: chunk digests, scanning, the sink, windows.

    def _take_point(self, point: RestartPoint, behind: bytes, is_all: bool) -> None:
        self._windows.add(trimmed(point, behind, is_all=is_all))

    def _take_block(self, block: bytearray, filled: int, offset: int) -> None:
        if self.fault is not None:
            return
        data = memoryview(block)[:filled]
        size = self._limits.chunk_bytes
        for begin in range(0, filled, size):
            self._chunk_digests += blake3(data[begin : begin + size]).digest()
        try:
            self._scanner.feed(data)
        except RefusedError as fault:
            self.fault = restated(fault)
            return
        if self._sink is not None:
            self._sink(offset, data)

    def _named_alike(self) -> bool:
        """Whether the blob's digest is the view's too, so that one hash does for both."""
        same = self._blob_hash.name == self._plain_hash.name
        return same and self._compression is Compression.PLAIN

    # The verdict.

    def _finish(self) -> LayerIndex:
        if self.received_bytes < self.blob_bytes:
            raise CorruptError(
                f"layer {self.layer} ended after {self.received_bytes} of {self.blob_bytes} bytes"
            )
        self._finish_stream()
        computed = Digest(self.layer.algorithm, self._blob_hash.hexdigest())
        if computed != self.layer:
            raise CorruptError(
                f"the bytes received for layer {self.layer} are {computed}: a broken transfer, or "
                "a source that lies"
            )
        if self.fault is not None:
            raise RefusedError(f"layer {self.layer}: {self.fault}") from self.fault
        view = self._verify_view()
        draft = self._draft(view)
        write_index(self._path, draft, self._windows)
        return LayerIndex.open(self._path, layer=self.layer)

    def _finish_stream(self) -> None:
        try:
            if self.fault is None:
                self._decode(memoryview(self._held))
                assert self._stream is not None  # the whole blob is here, so it was detected
                self._stream.finish()
                self._pass_points(self._points.end())
                if self._filled:
                    self._pass_block(self._stream.out_offset)
        except RefusedError as fault:
            self.fault = self.fault or restated(fault)
        self._pending.append((self._passed, None))
        while self._pending:
            self._settle_one()

    def _verify_view(self) -> Digest:
        digest = self._blob_hash if self._named_alike() else self._plain_hash
        computed = Digest(digest.name, digest.hexdigest())
        if self.diff_id is not None and computed != self.diff_id:
            raise RefusedError(
                f"layer {self.layer} unpacks to {computed}, but the image's config says diffID "
                f"{self.diff_id}: the image is wrong, rebuild it"
            )
        return computed

    def _draft(self, view: Digest) -> IndexDraft:
        stream = self._stream
        assert stream is not None
        view_bytes = stream.out_offset
        try:
            metadata = self._scanner.finish(view, view_bytes)
        except RefusedError as fault:
            raise RefusedError(f"layer {self.layer}: {fault}") from fault
        if view_bytes % self._limits.chunk_bytes:
            self._ends.append(stream.in_offset)
        if self._last_point and self._last_point >= view_bytes:
            self._windows.drop_last()
        return IndexDraft(
            layer=self.layer,
            diff_id=view,
            compression=self._compression,
            blob_bytes=self.blob_bytes,
            view_bytes=view_bytes,
            chunk_bytes=self._limits.chunk_bytes,
            chunk_digests=self._chunk_digests,
            chunk_ends=self._ends,
            erofs=metadata.erofs,
            needs_chain=metadata.needs_chain,
            entry_count=metadata.entry_count,
            longest_run_bytes=max(self._longest_run, self._tail_bytes(view_bytes)),
        )

    def _tail_bytes(self, view_bytes: int) -> int:
        plain = self._compression is Compression.PLAIN
        return 0 if plain else view_bytes - self._last_point
