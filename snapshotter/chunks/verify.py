"""The one place where a chunk's bytes are judged: length and BLAKE3 digest against the index."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from snapshotter.content import Digest
from snapshotter.errors import CorruptError

DIGEST_BYTES = 32

ChunkDigests = Callable[[int], bytes]
"""The BLAKE3 digest (32 bytes) that chunk ``n`` of a view must have; from a trusted index."""


def chunk_length(number: int, view_bytes: int, chunk_bytes: int) -> int:
    """Bytes of chunk ``number``: ``chunk_bytes``, or what is left for the last one."""
    return min(chunk_bytes, view_bytes - number * chunk_bytes)


def verify_chunk(
    view: Digest, number: int, data: bytes | memoryview, length: int, digest: bytes
) -> None:
    """Return if ``data`` is chunk ``number`` of ``view``; CorruptError says how it is not."""
    if len(data) != length:
        raise CorruptError(f"chunk {number} of {view}: {len(data)} bytes instead of {length}")
    if blake3(data).digest() != digest:
        raise CorruptError(f"chunk {number} of {view}: its bytes do not match their digest")
