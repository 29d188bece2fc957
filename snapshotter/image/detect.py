"""How a blob is compressed, told by its first bytes and never by its media type.

Labels lie: builders write gzip under plain media types and the reverse, and containerd goes by
content too. Bytes that match nothing are taken for plain tar, and the tar reader judges them.
"""

from __future__ import annotations

from snapshotter.content import Compression
from snapshotter.errors import RefusedError

DETECT_BYTES = 6
"""So many first bytes (or the whole blob, if it is shorter) decide."""

GZIP_MAGIC = b"\x1f\x8b\x08"  # RFC 1952, section 2.3.1: ID1, ID2, CM = deflate
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # RFC 8878, section 3.1.1
ZSTD_SKIPPABLE = range(0x184D2A50, 0x184D2A60)  # RFC 8878, section 3.1.2

_UNSUPPORTED = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


def detect(prefix: bytes, blob: str) -> Compression:
    """The compression of the blob that begins with ``prefix`` (DETECT_BYTES, fewer at its end).

    Raises RefusedError for forms that OCI layers do not have; ``blob`` names it there.
    """
    if prefix.startswith(GZIP_MAGIC):
        return Compression.GZIP
    if prefix.startswith(ZSTD_MAGIC):
        return Compression.ZSTD
    if len(prefix) >= 4 and int.from_bytes(prefix[:4], "little") in ZSTD_SKIPPABLE:
        return Compression.ZSTD
    for magic, name in _UNSUPPORTED.items():
        if prefix.startswith(magic):
            raise RefusedError(
                f"layer {blob} is compressed with {name}: OCI layers are gzip, zstd or plain tar; "
                "rebuild the image with one of these"
            )
    return Compression.PLAIN
