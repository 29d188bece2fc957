"""Taking in an index that somebody else made: checked wholly, or refused with the reason.

What comes out has the structure of one that was made here, lies inside its layer and says nothing
that a scan here would not have let pass. Whether it tells the truth of the layer's bytes is for its
signature to say, or for a comparison once the layer is here. Pure, and bounded by what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blake3 import blake3

from snapshotter.content import CHUNK_BYTES, Digest
from snapshotter.errors import RefusedError
from snapshotter.image import index_layout as layout
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import IndexLimits
from snapshotter.image.scan import device_tag
from snapshotter.image.scanned_rules import check_scanned

INDEX_BYTES = 256 * 1024 * 1024
"""The longest foreign index that is looked at: a million entries, or a layer of 400 GB."""

_TAR_BLOCK = 512
_OWN_DIRECTORIES = 2
"""What an image has besides what a scan counts: its root, and the layer's."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an index must be for, known from elsewhere: the manifest, the config, the artifact.

    ``windows_bytes``: the length of the windows blob that comes with it, 0 without one.
    """

    layer: Digest
    diff_id: Digest
    blob_bytes: int
    windows_bytes: int
    chunk_bytes: int = CHUNK_BYTES


def adopt(
    data: bytes | memoryview, claim: Claim, *, where: str, limits: IndexLimits | None = None
) -> bytes | memoryview:
    """The bytes to be kept as the layer's index, from those of a foreign one.

    Mostly these are ``data``; where its metadata image is valid but not to the byte what is written
    here, they hold the image as it is written here. RefusedError names ``where`` and the fault.
    About 7 µs and 1 KB of memory an entry; adopting.py does it for large ones in another process.
    """
    if len(data) > INDEX_BYTES:
        raise RefusedError(f"{where}: {len(data)} bytes, and no index has over {INDEX_BYTES}")
    limits = limits or IndexLimits()
    index = LayerIndex(memoryview(data), None, where=where)
    try:
        _check_claim(index, claim)
        _check_limits(index, limits)
        return _with_own_image(index, limits) or data
    except RefusedError as error:
        raise RefusedError(f"{where}: {error}") from error


def _check_claim(index: LayerIndex, claim: Claim) -> None:
    for what, said, wanted in (
        ("layer", index.layer, claim.layer),
        ("diffID", index.diff_id, claim.diff_id),
        ("length of the layer", index.blob_bytes, claim.blob_bytes),
        ("length of the windows", index.windows_bytes, claim.windows_bytes),
        ("chunk length", index.chunk_bytes, claim.chunk_bytes),
    ):
        if said != wanted:
            raise RefusedError(f"made for the {what} {said}, not {wanted}")


def _check_limits(index: LayerIndex, limits: IndexLimits) -> None:
    allowed = max(limits.bomb_floor_bytes, limits.max_ratio * index.blob_bytes)
    if index.view_bytes > min(allowed, limits.max_view_bytes):
        raise RefusedError(
            f"{index.blob_bytes} stored bytes are said to unpack to {index.view_bytes}: taken for "
            "a decompression bomb"
        )
    if index.entry_count > index.view_bytes // _TAR_BLOCK:
        raise RefusedError(f"{index.entry_count} entries in {index.view_bytes} bytes of tar")


def _with_own_image(index: LayerIndex, limits: IndexLimits) -> bytes | None:
    """The index with its image as it is written here; None if it is so already."""
    image = index.erofs
    reader = ErofsReader(image, device_bytes=index.view_bytes, entries=index.entry_count)
    counted = reader.superblock.inodes
    if counted > limits.scan.inodes + _OWN_DIRECTORIES:
        raise RefusedError(f"{counted} inodes, at most {limits.scan.inodes} are allowed")
    if reader.superblock.device_tag != device_tag(index.diff_id):
        raise RefusedError("its metadata image is made for another view")
    tree = reader.tree()
    check_scanned(tree, limits.scan)
    if tree.needs_chain != index.needs_chain:
        raise RefusedError("it does not say rightly whether it depends on the layers below")
    own = reader.rewritten(tree)
    if own == bytes(image):
        return None
    header = layout.unpack_header(index.data, index.where)
    tables = bytes(index.data[layout.HEADER_BYTES : header.erofs_offset])
    body = tables + own
    return replace(header, erofs_bytes=len(own), body_digest=blake3(body).digest()).pack() + body
