"""Directory blocks of EROFS: names sorted as bytes, packed into 512-byte blocks.

Pure; both ways. What is read is believed only as far as it was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from snapshotter.errors import RefusedError
from snapshotter.image.erofs_format import DIRENT, NID_BYTES
from snapshotter.image.names import NAME_BYTES
from snapshotter.image.tree import BLOCK_BYTES


def pack_names(names: Iterable[bytes]) -> tuple[list[int], int]:
    """How many of the sorted names (with ``.`` and ``..``) go to each block, and the size.

    The size counts whole blocks but for the last one, of which only what is used.
    """
    splits: list[int] = []
    count = used = 0
    for name in sorted([b".", b"..", *names]):
        need = DIRENT.size + len(name)
        if used + need > BLOCK_BYTES:
            splits.append(count)
            count = used = 0
        count += 1
        used += need
    splits.append(count)
    return splits, (len(splits) - 1) * BLOCK_BYTES + used


def directory_blocks(entries: Mapping[bytes, tuple[int, int]], splits: Iterable[int]) -> bytes:
    """The directory's data: ``entries`` maps each name to its inode's offset and file type."""
    names = sorted(entries)
    blocks: list[bytes] = []
    start = 0
    for count in splits:
        batch = names[start : start + count]
        start += count
        name_at = DIRENT.size * count
        parts: list[bytes] = []
        for name in batch:
            inode_at, file_type = entries[name]
            parts.append(DIRENT.pack(inode_at // NID_BYTES, name_at, file_type))
            name_at += len(name)
        block = b"".join(parts + batch)
        blocks.append(block if start == len(names) else block.ljust(BLOCK_BYTES, b"\0"))
    return b"".join(blocks)


class DirectoryEntry(NamedTuple):
    """One name of a directory as it is stored."""

    name: bytes
    nid: int
    file_type: int


def block_entries(data: bytes | memoryview) -> Iterator[DirectoryEntry]:
    """All entries of a directory's data, in stored order. RefusedError if a block is malformed."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield from _entries(bytes(data[start : start + BLOCK_BYTES]))


def find_entry(data: bytes | memoryview, name: bytes) -> DirectoryEntry | None:
    """The entry of ``name``, found by halving the blocks; None if there is none."""
    low, high = 0, -(-len(data) // BLOCK_BYTES)
    while low < high:
        middle = (low + high) // 2
        entries = list(_entries(bytes(data[middle * BLOCK_BYTES : (middle + 1) * BLOCK_BYTES])))
        if name < entries[0].name:
            high = middle
        elif name > entries[-1].name:
            low = middle + 1
        else:
            return next((entry for entry in entries if entry.name == name), None)
    return None


def _entries(block: bytes) -> Iterator[DirectoryEntry]:
    names_at = int.from_bytes(block[8:10], "little") if len(block) > DIRENT.size else 0
    count = names_at // DIRENT.size
    if not count or names_at % DIRENT.size or names_at >= len(block):
        raise RefusedError("EROFS image: a directory block without entries")
    stored = list(DIRENT.iter_unpack(block[:names_at]))
    used = len(block.rstrip(b"\0"))
    ends = [name_at for _, name_at, _ in stored[1:]]
    ends.append(used)
    ruled_out = b"/" in block[names_at:used] or 0 in block[names_at:used]
    for (nid, name_at, file_type), end in zip(stored, ends, strict=True):
        name = block[name_at:end]
        if name_at < names_at or ruled_out or not 0 < len(name) <= NAME_BYTES:
            raise RefusedError(f"EROFS image: a directory has the name {name[:60]!r}")
        yield DirectoryEntry(name, nid, file_type)
