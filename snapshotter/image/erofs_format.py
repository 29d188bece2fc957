"""The EROFS on-disk format, as far as Ember writes and reads it: structs, flags, addresses.

Source: the kernel's Documentation/filesystems/erofs.rst and its on-disk header; all little endian.
An image has 512-byte blocks and one extra device, the view. Files that lie in the view in one
piece are flat: their start block is an address behind the image's own blocks, where the device
table maps the view (``uniaddr``). Others have a chunk table. Pure.
"""

from __future__ import annotations

from struct import Struct

from snapshotter.image.tree import BLOCK_BYTES

MAGIC = 0xE0F5E1E2
SUPERBLOCK_AT = 1024
BLOCK_BITS = 9

SUPERBLOCK = Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
"""magic checksum compat blkszbits extslots root_nid inodes epoch fixed_nsec blocks meta_blkaddr
xattr_blkaddr uuid volume_name incompat compression extra_devices devt_slotoff dirblkbits
prefix_count prefix_start packed_nid xattr_filter"""

COMPAT_CHECKSUM = 0x1
COMPAT_MTIME = 0x2
INCOMPAT_CHUNKED = 0x4
INCOMPAT_DEVICES = 0x8

DEVICE_AT = SUPERBLOCK_AT + 128
DEVICE_SLOT_BYTES = 128
DEVICE = Struct("<64sII56x")
"""tag, blocks, unified start block"""
TAG_BYTES = 64

LAYER_NAME = b"layer"
"""The only name in an image's root: the directory that is the layer."""

NID_BYTES = 32
FIRST_INODE_AT = 3 * BLOCK_BYTES
"""Inodes begin behind the superblock's block; a nid is an inode's offset in the image / 32."""

EXTENDED = Struct("<HHHHQIIIIQIIB15x")
"""format xattr_count mode reserved size union ino uid gid mtime mtime_nsec nlink flags

The last is the first of 16 reserved bytes, which the kernel does not read: Ember keeps there what
a directory entry of EROFS can't say."""
FLAG_IMPLIED = 1
"""The directory is only implied by its children's names (Inode.implied)."""
COMPACT = Struct("<HHHHIIIIHHI")
"""format xattr_count mode nlink size mtime_offset union ino uid gid reserved"""

LAYOUT_PLAIN = 0
LAYOUT_INLINE = 2
LAYOUT_CHUNKED = 4

FLAT_BYTES = 4096
"""A file in one piece that is longer has a chunk table of one entry. The kernel reads flat data of
another device page by page (it compares an address in the device with one in the common space), and
what a chunk table names in pieces of many pages."""
CHUNK_INDEXED = 0x20
CHUNK_BITS_MAX = 31
CHUNK_INDEX = Struct("<HHI")
"""start block high, device (0 the image itself, 1 the view), start block"""
HOLE = 0xFFFFFFFF

XATTR_HEADER = Struct("<IB7x")
"""name filter, number of shared ids"""
XATTR_ENTRY = Struct("<BBH")
"""name length, prefix index, value size"""
XATTR_PREFIXES = (
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (1, b"user."),
    (4, b"trusted."),
    (6, b"security."),
)
OPAQUE_XATTR = b"trusted.overlay.opaque"
OPAQUE_VALUE = b"y"

DIRENT = Struct("<QHBx")
"""nid, offset of the name in its block, file type"""

TYPE_BITS = {1: 0o100000, 2: 0o040000, 3: 0o020000, 4: 0o060000, 5: 0o010000, 6: 0o140000}
TYPE_BITS[7] = 0o120000
"""File type of a directory entry (1 to 7) to the type bits of a mode."""


def padded(length: int, unit: int) -> int:
    """``length`` rounded up to a multiple of ``unit``."""
    return -(-length // unit) * unit


def encode_device(major: int, minor: int) -> int:
    """The kernel's 32-bit form of a device number (new_encode_dev)."""
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def decode_device(encoded: int) -> tuple[int, int]:
    """(major, minor) of the kernel's 32-bit form."""
    return encoded >> 8 & 0xFFF, (encoded & 0xFF) | (encoded >> 12 & 0xFFF00)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def checksum(block: bytes | memoryview) -> int:
    """crc32c (Castagnoli) seeded with all ones and not inverted at the end, as EROFS wants it."""
    crc = 0xFFFFFFFF
    for byte in block:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc
