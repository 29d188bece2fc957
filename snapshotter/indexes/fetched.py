"""The index of one layer, out of an artifact into a directory: whole and checked, or not there.

As when an index is written: the windows first, the index last, each under a temporary name until
it is synced. Nothing gets its name that was not adopted: checked wholly, as a foreign index is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from ioengine.directories import sync_directory
from snapshotter.errors import CorruptError
from snapshotter.image.adopting import adopt_file
from snapshotter.image.adoption import Claim
from snapshotter.image.index_writer import (
    Writing,
    index_path,
    open_private,
    temporary_name,
)
from snapshotter.image.windows import WINDOWS_SUFFIX
from snapshotter.indexes.artifact import IndexedLayer
from snapshotter.indexes.find import Found, Source, fetch_index


async def fetch_into(
    source: Source, found: Found, layer: IndexedLayer, blob_bytes: int, directory: Path
) -> Path:
    """Write index and windows of ``layer`` (stored in ``blob_bytes``) to ``directory``: the path
    of the index.

    Raises RefusedError if it is no sound index of the layer, CorruptError if it is not what the
    artifact promises, NoSpaceError, and what the source raises. The caller sees to it that nobody
    else writes this layer's.
    """
    windows_bytes = layer.windows.size_bytes if layer.windows else 0
    claim = Claim(layer.layer, layer.diff_id, blob_bytes, windows_bytes)
    path = index_path(directory, layer.layer)
    windows = path.with_suffix(WINDOWS_SUFFIX)
    new, new_windows = temporary_name(path), temporary_name(windows)
    try:
        with Writing(path):
            if layer.windows is not None:
                await _windows(source, found, layer, new_windows)
            with open_private(new) as file:
                await fetch_index(source, found, layer, file.write)
                await asyncio.to_thread(_sync, file)
            await adopt_file(new, claim)
            path.unlink(missing_ok=True)
            sync_directory(directory)
            if layer.windows is None:
                windows.unlink(missing_ok=True)
            else:
                new_windows.rename(windows)
            new.rename(path)
            sync_directory(directory)
    finally:
        new.unlink(missing_ok=True)
        new_windows.unlink(missing_ok=True)
    return path


async def _windows(source: Source, found: Found, layer: IndexedLayer, path: Path) -> None:
    blob, promised = found.windows(layer), layer.windows
    assert blob is not None and promised is not None
    digest = hashlib.new(promised.digest.algorithm)
    with open_private(path) as file:
        async with contextlib.aclosing(source.stream(blob)) as pieces:
            async for piece in pieces:
                digest.update(piece)
                file.write(piece)
        await asyncio.to_thread(_sync, file)
    if digest.hexdigest() != promised.digest.hex:
        raise CorruptError(f"windows of layer {layer.layer}: not those that were promised")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
