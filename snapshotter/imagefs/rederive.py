"""A layer's view, read once more from the disk: is it what its index says, and its digest?

What a reader can see is decided by three things: the plain bytes, the digests that let chunks in,
and the EROFS image. All three are made again from the plain bytes and compared: the image by what
can be read of it, for another Ember may have laid it out otherwise. Where inflating can begin is
not compared: a wrong place gives bytes that fail their chunk's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from snapshotter.content import Digest
from snapshotter.errors import RefusedError
from snapshotter.image.index import LayerIndex
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import TarLayerScanner
from snapshotter.indexes.compare import same_files

_READ_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """``fault`` is empty if all is right; ``bytes_right``: the view has its digest at least."""

    bytes_right: bool
    fault: str


class AbandonedError(Exception):
    """The view went while it was read."""


def compare(index: LayerIndex, view: Path) -> Verdict:
    """Read ``view`` wholly; blocks for long. Raises AbandonedError, and OSError of the disk.

    ``view`` must be the path past the guard. Only to be believed if the view is whole afterwards.
    """
    plain = hashlib.new(index.diff_id.algorithm)
    scanner = TarLayerScanner(ScanLimits())
    wrong_chunk, scan_fault = -1, ""
    size = index.chunk_bytes
    at = 0
    with open(view, "rb", buffering=0) as file:
        while at < index.view_bytes:
            block = memoryview(
                _read(file.fileno(), min(_READ_CHUNKS * size, index.view_bytes - at), at)
            )
            plain.update(block)
            for start in range(0, len(block), size):
                number = (at + start) // size
                if blake3(block[start : start + size]).digest() != index.chunk_digest(number):
                    wrong_chunk = number
            if not scan_fault:
                try:
                    scanner.feed(block)
                except RefusedError as error:
                    scan_fault = str(error)
            with contextlib.suppress(OSError):  # it was read for nobody
                os.posix_fadvise(file.fileno(), at, len(block), os.POSIX_FADV_DONTNEED)
            at += len(block)
    found = Digest(plain.name, plain.hexdigest())
    if found != index.diff_id:
        return Verdict(False, f"its chunks make up {found}, not {index.diff_id}")
    if wrong_chunk >= 0:
        return Verdict(True, f"the digest of its chunk {wrong_chunk} is wrong")
    return Verdict(True, scan_fault or _metadata_fault(index, scanner))


def _metadata_fault(index: LayerIndex, scanner: TarLayerScanner) -> str:
    try:
        own = scanner.finish(index.diff_id, index.view_bytes)
    except RefusedError as error:
        return str(error)
    if not same_files(index, own.erofs):
        return "its file system is not what the layer's tar holds"
    if (own.needs_chain, own.entry_count) != (index.needs_chain, index.entry_count):
        return "it says something else of the layer's entries than its tar"
    return ""


def _read(descriptor: int, length: int, offset: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            raise AbandonedError
        data += more
    return data
