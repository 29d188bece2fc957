"""The index of one layer, out of an artifact into a directory: whole and checked, or not there.

As when an index is written: the windows first, the index last, each under a temporary name until
it is synced. Nothing gets its name that was not adopted: checked wholly, as a foreign index is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO, Protocol

from ioengine.directories import sync_directory
from snapshotter.chunks.offload import offload
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import CorruptError, RefusedError
from snapshotter.image.adopting import adopt_file
from snapshotter.image.adoption import Claim
from snapshotter.image.index_writer import (
    Writing,
    index_path,
    open_private,
    temporary_name,
)
from snapshotter.image.windows import WINDOWS_SUFFIX
from snapshotter.indexes.artifact import Content, IndexedLayer
from snapshotter.indexes.find import Found
from snapshotter.indexes.packing import Unpacker
from snapshotter.oci.resolver import LayerDescriptor


class Blobs(Protocol):
    """Whole blobs from their origin, of the length that was promised."""

    def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]: ...


async def fetch_into(source: Blobs, found: Found, layer: LayerDescriptor, directory: Path) -> Path:
    """Write index and windows of ``layer`` to ``directory``: the path of the index.

    Raises RefusedError if it is no sound index of the layer, CorruptError if it is not what the
    artifact promises, NoSpaceError, and what the source raises. The caller sees to it that nobody
    else writes this layer's.
    """
    offered = found.artifact.layer(layer.digest)
    if offered is None:
        raise RefusedError(f"layer {layer.digest} of the image is not in it")
    offered.check_offer(layer.diff_id, layer.size)
    windows_bytes = offered.windows.size_bytes if offered.windows else 0
    claim = Claim(layer.digest, layer.diff_id, layer.size, windows_bytes)
    path = index_path(directory, layer.digest)
    windows = path.with_suffix(WINDOWS_SUFFIX)
    new, new_windows = temporary_name(path), temporary_name(windows)
    try:
        with Writing(path):
            if offered.windows is not None:
                await _fetch_windows(source, found.repository, offered, new_windows)
            await fetch_index(source, found.repository, offered, new)
            await adopt_file(new, claim)
            path.unlink(missing_ok=True)
            sync_directory(directory)
            if offered.windows is None:
                windows.unlink(missing_ok=True)
            else:
                new_windows.rename(windows)
            new.rename(path)
            sync_directory(directory)
    finally:
        new.unlink(missing_ok=True)
        new_windows.unlink(missing_ok=True)
    return path


async def fetch_index(
    source: Blobs,
    repository: str,
    layer: IndexedLayer,
    path: Path,
    executor: Executor | None = None,
) -> None:
    """Write the plain index file of ``layer`` to ``path``, a new file, synced.

    Nothing of it counts before this returns. Raises CorruptError if it is not what the artifact
    promises, OSError, and what the source raises.
    """
    blob = _blob(repository, layer.packed)
    with open_private(path) as file:
        what = f"index of layer {layer.layer} ({blob.digest})"
        unpacker = Unpacker(layer.plain, file.write, what)
        await _pour(source, blob, file, unpacker.feed, executor)
        unpacker.finish()


async def _fetch_windows(source: Blobs, repository: str, layer: IndexedLayer, path: Path) -> None:
    promised = layer.windows
    assert promised is not None
    digest = hashlib.new(promised.digest.algorithm)
    with open_private(path) as file:

        def take(piece: bytes) -> None:
            digest.update(piece)
            file.write(piece)

        await _pour(source, _blob(repository, promised), file, take, None)
    if Digest(digest.name, digest.hexdigest()) != promised.digest:
        raise CorruptError(f"windows of layer {layer.layer}: not those that were promised")


async def _pour(
    source: Blobs,
    blob: BlobRef,
    file: BinaryIO,
    take: Callable[[bytes], None],
    executor: Executor | None,
) -> None:
    """Have ``take`` put the blob into the file, in other threads; in the end it is on the disk."""
    async with contextlib.aclosing(source.stream(blob)) as pieces:
        async for piece in pieces:
            await offload(executor, take, piece)
    await offload(executor, _sync, file)


def _blob(repository: str, content: Content) -> BlobRef:
    return BlobRef(repository, content.digest, content.size_bytes)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
