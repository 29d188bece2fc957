"""Stored forms of the same plain bytes, and the shortest way to an index of them."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import zstandard

from snapshotter.content import Digest
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import IndexLimits, LayerIndexer
from snapshotter.image.scan import LayerMetadata, LayerScanner

SMALL = IndexLimits(spacing_bytes=16 * 1024, chunk_bytes=4096)
"""Dense checkpoints and small chunks, so that small layers have many of both."""


def sha256(data: bytes) -> Digest:
    return Digest("sha256", hashlib.sha256(data).hexdigest())


def text(length_bytes: int, seed: int = 1) -> bytes:
    """Bytes that compress to about a third, and whose matches reach far back."""
    chance = random.Random(seed)
    words = [chance.randbytes(chance.randrange(3, 40)) for _ in range(400)]
    out = bytearray()
    while len(out) < length_bytes:
        out += chance.choice(words)
        if chance.random() < 0.1:
            out += chance.randbytes(20)
    return bytes(out[:length_bytes])


def tar(files: Iterable[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def member(plain: bytes, level: int = 6, memory_level: int = 8) -> bytes:
    """One gzip member; a low memory level makes its deflate blocks short."""
    deflater = zlib.compressobj(level, zlib.DEFLATED, 31, memory_level)
    return deflater.compress(plain) + deflater.flush()


def members(plain: bytes, size: int, level: int = 6) -> bytes:
    """Many gzip members, ``size`` plain bytes in each."""
    return b"".join(member(plain[at : at + size], level) for at in range(0, len(plain), size))


def frame(plain: bytes, level: int = 3, *, checksum: bool = True, sized: bool = True) -> bytes:
    """One zstd frame."""
    compressor = zstandard.ZstdCompressor(
        level=level, write_checksum=checksum, write_content_size=sized
    )
    return compressor.compress(plain)


def frames(plain: bytes, size: int) -> bytes:
    """Many zstd frames, with and without checksum and content size in turn."""
    return b"".join(
        frame(plain[at : at + size], checksum=bool(n & 1), sized=bool(n & 2))
        for n, at in enumerate(range(0, len(plain), size))
    )


def skippable(content: bytes, number: int = 0) -> bytes:
    return (
        (0x184D2A50 + number).to_bytes(4, "little") + len(content).to_bytes(4, "little") + content
    )


class NoScanner:
    """Takes any plain bytes, tar or not; the index has no metadata image."""

    def feed(self, data: memoryview) -> None:
        return None

    def finish(self, view: Digest, view_bytes: int) -> LayerMetadata:
        return LayerMetadata(b"", False, 0)


class View:
    """A sink that keeps the plain bytes, and holds them to be in order."""

    def __init__(self) -> None:
        self.data = bytearray()

    def __call__(self, offset: int, data: memoryview) -> None:
        assert offset == len(self.data)
        self.data += data


def index_of(
    blob: bytes,
    plain: bytes | None,
    directory: Path,
    *,
    limits: IndexLimits = SMALL,
    piece_bytes: int = 1 << 20,
    sink: View | None = None,
    scanner: LayerScanner | None = None,
) -> LayerIndex:
    """Index ``blob``, fed in pieces, tar or not; ``plain`` None leaves the diffID open."""
    indexer = LayerIndexer(
        sha256(blob),
        None if plain is None else sha256(plain),
        blob_bytes=len(blob),
        sink=sink,
        directory=directory,
        limits=limits,
        scanner=scanner or NoScanner(),
    )
    with indexer:
        for at in range(0, len(blob), piece_bytes):
            indexer.feed(blob[at : at + piece_bytes])
        return indexer.finish()
