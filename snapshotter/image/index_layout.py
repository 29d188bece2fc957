"""The bytes of an index file: header, tables and their places. Pure; all numbers little-endian.

    header (512 bytes, zero padded) | chunk digests, 32 each | chunk input ends, 8 each |
    checkpoints, 48 each | zeros up to a multiple of 512 | EROFS metadata image

The header carries counts and no offsets, so nothing can point astray: the places follow from the
counts, and the file's length must be their sum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blake3 import blake3

from snapshotter.content import Compression, Digest
from snapshotter.errors import RefusedError

MAGIC = b"EMBERIDX"
VERSION = 2
HEADER_BYTES = 512
DIGEST_BYTES = 32
END_BYTES = 8
EROFS_ALIGNMENT = 512
WINDOW_DIGEST_BYTES = 16
NEEDS_CHAIN = 1

HEADER = struct.Struct("<8sIIBBBBI9Q64s64s32s")
CHECKSUM = struct.Struct("<32s")
CHECKPOINT = struct.Struct("<QQQIHBB16s")
CHECKPOINT_BYTES = CHECKPOINT.size

_COMPRESSIONS = {1: Compression.PLAIN, 2: Compression.GZIP, 3: Compression.ZSTD}
_COMPRESSION_IDS = {value: key for key, value in _COMPRESSIONS.items()}
_ALGORITHMS = {1: ("sha256", 32), 2: ("sha512", 64)}
_ALGORITHM_IDS = {name: key for key, (name, _) in _ALGORITHMS.items()}
_CHUNK_BYTES = {1 << power for power in range(12, 25)}
_MAX_BYTES = 1 << 56  # keeps every sum of two sizes inside 64 bits


@dataclass(frozen=True, slots=True)
class Header:
    """What an index says about its layer, and how long its tables are. Sizes in bytes."""

    layer: Digest
    diff_id: Digest
    compression: Compression
    blob_bytes: int
    view_bytes: int
    chunk_bytes: int
    checkpoint_count: int
    erofs_bytes: int
    entry_count: int
    longest_run_bytes: int
    windows_bytes: int
    needs_chain: bool
    body_digest: bytes

    @property
    def chunk_count(self) -> int:
        return -(-self.view_bytes // self.chunk_bytes)

    @property
    def ends_offset(self) -> int:
        return HEADER_BYTES + DIGEST_BYTES * self.chunk_count

    @property
    def checkpoints_offset(self) -> int:
        return self.ends_offset + END_BYTES * self.chunk_count

    @property
    def tables_end(self) -> int:
        return self.checkpoints_offset + CHECKPOINT_BYTES * self.checkpoint_count

    @property
    def erofs_offset(self) -> int:
        return -(-self.tables_end // EROFS_ALIGNMENT) * EROFS_ALIGNMENT

    @property
    def file_bytes(self) -> int:
        return self.erofs_offset + self.erofs_bytes

    def pack(self) -> bytes:
        """The header's 512 bytes, its own checksum last."""
        fields = HEADER.pack(
            MAGIC,
            VERSION,
            NEEDS_CHAIN if self.needs_chain else 0,
            _COMPRESSION_IDS[self.compression],
            _ALGORITHM_IDS[self.layer.algorithm],
            _ALGORITHM_IDS[self.diff_id.algorithm],
            0,
            self.chunk_bytes,
            self.file_bytes,
            self.blob_bytes,
            self.view_bytes,
            self.chunk_count,
            self.checkpoint_count,
            self.erofs_bytes,
            self.entry_count,
            self.longest_run_bytes,
            self.windows_bytes,
            bytes.fromhex(self.layer.hex),
            bytes.fromhex(self.diff_id.hex),
            self.body_digest,
        )
        padded = fields.ljust(HEADER_BYTES - CHECKSUM.size, b"\0")
        return padded + blake3(padded).digest()


def unpack_header(data: bytes | memoryview, where: str) -> Header:
    """Read a header; RefusedError names the file ``where`` and what is wrong with it."""
    raw = bytes(data[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise RefusedError(f"{where} is not an index: it does not begin as one, or is cut")
    version = int.from_bytes(raw[8:12], "little")
    if version > VERSION:
        raise RefusedError(
            f"{where} was made by a newer Ember: it is of version {version}, this one reads up to "
            f"{VERSION}; upgrade Ember, or remove it and the layer is indexed again"
        )
    if version != VERSION:
        raise RefusedError(
            f"{where} is an index of version {version}, this Ember reads {VERSION}: remove it and "
            "the layer is indexed again"
        )
    padded, checksum = raw[: -CHECKSUM.size], raw[-CHECKSUM.size :]
    if blake3(padded).digest() != checksum:
        raise RefusedError(f"{where}: the header's checksum is wrong; remove it to index again")
    header = _header(HEADER.unpack_from(padded), where)
    if header.pack() != raw:
        raise RefusedError(f"{where}: the header says something where nothing belongs")
    return header


def _header(fields: tuple[int | bytes, ...], where: str) -> Header:
    flags, compression, layer_id, diff_id, chunk_bytes = (_int(fields[i]) for i in (2, 3, 4, 5, 7))
    sizes = [_int(field) for field in fields[8:17]]
    if flags & ~NEEDS_CHAIN or compression not in _COMPRESSIONS:
        raise RefusedError(f"{where}: unknown flags {flags:#x} or compression {compression}")
    if chunk_bytes not in _CHUNK_BYTES or max(sizes) > _MAX_BYTES:
        raise RefusedError(f"{where}: sizes that no index has (chunks of {chunk_bytes} bytes)")
    header = Header(
        layer=_digest(layer_id, fields[17], where),
        diff_id=_digest(diff_id, fields[18], where),
        compression=_COMPRESSIONS[compression],
        blob_bytes=sizes[1],
        view_bytes=sizes[2],
        chunk_bytes=chunk_bytes,
        checkpoint_count=sizes[4],
        erofs_bytes=sizes[5],
        entry_count=sizes[6],
        longest_run_bytes=sizes[7],
        windows_bytes=sizes[8],
        needs_chain=bool(flags & NEEDS_CHAIN),
        body_digest=_bytes(fields[19]),
    )
    if header.chunk_count != sizes[3] or header.file_bytes != sizes[0]:
        raise RefusedError(f"{where}: the header's counts and sizes contradict each other")
    return header


def _digest(algorithm_id: int, field: int | bytes, where: str) -> Digest:
    if algorithm_id not in _ALGORITHMS:
        raise RefusedError(f"{where}: unknown digest algorithm {algorithm_id}")
    name, size = _ALGORITHMS[algorithm_id]
    return Digest(name, _bytes(field)[:size].hex())


def _int(field: int | bytes) -> int:
    assert isinstance(field, int)
    return field


def _bytes(field: int | bytes) -> bytes:
    assert isinstance(field, bytes)
    return field
