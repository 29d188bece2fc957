"""What a reader must see of a handmade layer, path by path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from tests.treecheck import Row, Rows


@dataclass(frozen=True, slots=True)
class LayerCase:
    """Layers, lowest first, and the rows of the stack."""

    name: str
    layers: tuple[bytes, ...]
    rows: Rows


def is_file(data: bytes, **fields: Any) -> Row:
    """A file of this content."""
    digest = hashlib.sha256(data).hexdigest()
    return Row("file", size=len(data), sha256=digest, **fields)


def is_dir(mode: int = 0o755, uid: int = 0, gid: int = 0, **fields: Any) -> Row:
    """A directory with these attributes."""
    return Row("dir", mode, uid, gid, **fields)


def is_link(target: str) -> Row:
    """A symbolic link."""
    return Row("symlink", link=target, size=len(target), mode=0o777)
