"""The smallest EROFS image that uses what lazy layers need, written by hand.

512-byte blocks, one directory with one regular file ``data`` whose bytes are those of the first
extra device, from its start. Format: the kernel's fs/erofs/erofs_fs.h. For probes and tests; real
layers are written elsewhere.
"""

from __future__ import annotations

import struct

BLOCK_BYTES = 512
FILE_NAME = b"data"
_MAGIC = 0xE0F5E1E2
_CHUNKED_FILE, _DEVICE_TABLE = 0x4, 0x8
_META_BLOCK = 3
_FILE_NID = 4
_HOLE_FREE_INDEX = 0x20


def probe_image(length_bytes: int) -> bytes:
    """An image of 2,048 bytes whose file has ``length_bytes`` (≥ 1).

    The device must have as many bytes, rounded up to whole blocks. ValueError where the length is
    not positive or too long for 32-bit block numbers.
    """
    blocks = -(-length_bytes // BLOCK_BYTES)
    chunk_bits = max(blocks - 1, 0).bit_length()
    if length_bytes < 1 or chunk_bits > 31:
        raise ValueError(f"no probe image of {length_bytes} bytes can be made")
    image = bytearray(4 * BLOCK_BYTES)
    image[1024:1152] = _superblock()
    image[1152:1280] = struct.pack("<64sII56x", b"probe", blocks, 0)
    names = [(b".", 0, 2), (b"..", 0, 2), (FILE_NAME, _FILE_NID, 1)]
    directory = _directory(names)
    root = _inode(layout=2, mode=0o040755, size=len(directory), union=0, number=1, links=2)
    file = _inode(
        layout=4,
        mode=0o100755,
        size=length_bytes,
        union=_HOLE_FREE_INDEX | chunk_bits,
        number=2,
        links=1,
    )
    meta = _META_BLOCK * BLOCK_BYTES
    image[meta : meta + len(root) + len(directory)] = root + directory
    at = meta + _FILE_NID * 32
    index = struct.pack("<HHI", 0, 1, 0)  # device 1, block 0
    image[at : at + len(file) + len(index)] = file + index
    return bytes(image)


def _superblock() -> bytes:
    return struct.pack(
        "<IIIBBHQQIIII16s16sIHHHBBIQB23x",
        _MAGIC,
        0,  # no checksum
        0,
        BLOCK_BYTES.bit_length() - 1,
        0,
        0,  # root's nid
        2,  # inodes
        0,
        0,
        4,  # blocks
        _META_BLOCK,
        0,
        b"",
        b"ember-probe",
        _CHUNKED_FILE | _DEVICE_TABLE,
        0,
        1,  # one extra device
        9,  # the device table's place, in slots of 128 bytes
        0,
        0,
        0,
        0,
        0,
    )


def _inode(*, layout: int, mode: int, size: int, union: int, number: int, links: int) -> bytes:
    return struct.pack(
        "<HHHHQIIIIQII16x", layout << 1 | 1, 0, mode, 0, size, union, number, 0, 0, 0, 0, links
    )


def _directory(entries: list[tuple[bytes, int, int]]) -> bytes:
    """One directory block's content: entries (name, nid, type), sorted by name."""
    heads, names = b"", b""
    for name, nid, kind in entries:
        heads += struct.pack("<QHBB", nid, len(entries) * 12 + len(names), kind, 0)
        names += name
    return heads + names
