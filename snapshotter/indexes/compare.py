"""Two indexes of one layer: where they say different things of it.

Bytes need not be equal: another zlib or libzstd may end chunks elsewhere and pack windows
otherwise, and another Ember may lay inodes out otherwise within a version of the format. What a
reader sees of the layer is one question, how it is decoded another one. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from snapshotter.errors import RefusedError
from snapshotter.image.erofs_reader import ErofsReader
from snapshotter.image.index import LayerIndex
from snapshotter.image.stream import RestartPoint

_DIFFERENCE_LIMIT = 20


def same_chunks(one: LayerIndex, other: LayerIndex) -> bool:
    """Whether both let the same bytes into a view."""
    shape = (one.view_bytes, one.chunk_bytes)
    same = shape == (other.view_bytes, other.chunk_bytes)
    return same and one.chunk_digests == other.chunk_digests


def same_files(index: LayerIndex, own: bytes | memoryview) -> bool:
    """Whether the index's metadata image says what ``own`` says, which was written here: as it is,
    or written again here from what can be read of it. The latter takes some µs an entry."""
    if index.erofs == own:
        return True
    try:
        reader = ErofsReader(index.erofs, device_bytes=index.view_bytes, entries=index.entry_count)
        return reader.rewritten(reader.tree()) == own
    except RefusedError:
        return False


def shows_otherwise(one: LayerIndex, other: LayerIndex) -> bool:
    """Whether a reader would see something else by ``one`` than by ``other``: other bytes, other
    files or rights. How the layer is decoded counts for nothing here. ``other`` was made here."""
    return not same_chunks(one, other) or not same_files(one, other.erofs)


def differences(promised: LayerIndex, derived: LayerIndex) -> list[str]:
    """What ``promised`` says otherwise than ``derived``, which was made of verified bytes: what
    `shows_otherwise` looks at, named, and how the layer is decoded.

    Empty if the layer means the same by both.
    """
    found = []
    for name, words in _FACTS:
        one, other = getattr(promised, name), getattr(derived, name)
        if one != other:
            found.append(f"{words}: {one}, derived {other}")
    if not same_files(promised, derived.erofs):
        found.append("files, modes or links: the metadata image differs")
    if promised.chunk_count == derived.chunk_count and not same_chunks(promised, derived):
        found += [
            f"the digest of chunk {number}"
            for number in range(promised.chunk_count)
            if promised.chunk_digest(number) != derived.chunk_digest(number)
        ]
    found += _checkpoints(promised, derived)
    return found[:_DIFFERENCE_LIMIT]


_FACTS = (
    ("layer", "layer"),
    ("diff_id", "diffID"),
    ("compression", "compression"),
    ("blob_bytes", "stored bytes"),
    ("view_bytes", "plain bytes"),
    ("chunk_bytes", "bytes of a chunk"),
    ("entry_count", "entries"),
    ("needs_chain", "whether layers below matter"),
)


def _checkpoints(promised: LayerIndex, derived: LayerIndex) -> list[str]:
    """Checkpoints that lead to another place or begin with another window.

    Where an Ember puts them is its choice, so those are held against each other that begin at the
    same place. What else they may get wrong fails the digest of a chunk, and costs bytes.
    """
    ours = [derived.checkpoint(number) for number in range(derived.checkpoint_count)]
    by_stored = {point.in_offset: point for point in ours}
    by_plain = {point.out_offset: point for point in ours}
    found = []
    for number in range(promised.checkpoint_count):
        point = promised.checkpoint(number)
        own = by_stored.get(point.in_offset) or by_plain.get(point.out_offset)
        if own is None:
            continue
        try:
            one = promised.restart_point(point)
        except RefusedError as error:
            found.append(str(error))
            continue
        if _leads_elsewhere(one, derived.restart_point(own)):
            found.append(f"checkpoint {number}")
    return found


def _leads_elsewhere(one: RestartPoint, own: RestartPoint) -> bool:
    """Of a window those bytes count that ``own`` has kept: others are zero, and never reached."""
    if replace(one, window=b"") != replace(own, window=b""):
        return True
    kept = int.from_bytes(own.window.translate(_KEPT))
    return bool((int.from_bytes(one.window) ^ int.from_bytes(own.window)) & kept)


_KEPT = bytes([0]) + bytes([255]) * 255
