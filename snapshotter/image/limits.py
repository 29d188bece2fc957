"""What a layer may ask for before it is called a bomb. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Bounds of one layer's scan; RefusedError names the one that was passed.

    ``inodes`` counts implied directories too; ``text_bytes`` sums names, link targets and xattrs;
    ``inline_bytes`` is file content that has to be carried in the metadata; ``view_bytes`` is the
    plain tar (EROFS block addresses end at 2 TiB); ``sparse_pieces`` sums the lines of sparse
    maps; ``steps`` is how many names are walked to resolve parents.
    """

    inodes: int = 1_000_000
    text_bytes: int = 256 << 20
    inline_bytes: int = 64 << 20
    view_bytes: int = 1 << 40
    sparse_pieces: int = 1 << 20
    steps: int = 40_000_000
