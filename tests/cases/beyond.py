"""Layers that a tar may hold and containerd cannot unpack."""

from __future__ import annotations

from tests.cases.rows import LayerCase, is_file
from tests.cases.sparse import SPARSE_SHAPES, filled, sparse_old
from tests.cases.tars import (
    file,
    hardlink,
    header,
    layer,
    padded,
    pax,
    special,
)
from tests.treecheck import Rows


def beyond_containerd() -> list[LayerCase]:
    """What a tar may hold and containerd's unpacker, or ext4 below it, gives up on."""
    later = layer(
        hardlink(b"before-2", b"before-1"),
        hardlink(b"before-1", b"target"),
        file(b"target", b"content"),
        hardlink(b"replaced", b"never-there"),
        file(b"replaced", b"r"),
        file(b"never-there", b""),
    )
    later_rows: Rows = {
        "before-1": is_file(b"content", hardlink_of=""),
        "before-2": is_file(b"content", hardlink_of="before-1"),
        "target": is_file(b"content", hardlink_of="before-1"),
        "replaced": is_file(b"r", hardlink_of=""), "never-there": is_file(b""),
    }  # fmt: skip
    large = {f"user.{n}": bytes([n]) * 900 for n in range(20)}
    records = [(f"SCHILY.xattr.{name}", value) for name, value in large.items()]
    old = [sparse_old(name.encode(), *shape) for name, shape in SPARSE_SHAPES.items()]
    old_rows = {name: is_file(filled(*shape)) for name, shape in SPARSE_SHAPES.items()}
    contiguous = header(b"contiguous", type=b"7", size=3) + padded(b"con")
    return [
        LayerCase("links to later entries", (later,), later_rows),
        LayerCase(
            "many xattrs", (layer(pax(records) + file(b"f")),), {"f": is_file(b"", xattrs=large)}
        ),
        LayerCase("old sparse files", (layer(*old, file(b"z")),), old_rows | {"z": is_file(b"")}),
        LayerCase("contiguous", (layer(contiguous),), {"contiguous": is_file(b"con")}),
        LayerCase(
            "a global header without records",
            (layer(special(b"g", b"none at all"), file(b"f")),),
            {"f": is_file(b"")},
        ),
    ]
