"""Directory blocks of EROFS: names sorted as bytes, packed into 512-byte blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from snapshotter.image.erofs_format import DIRENT, NID_BYTES
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


def directory_blocks(entries: Mapping[bytes, tuple[int, int]], splits: list[int]) -> bytes:
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
