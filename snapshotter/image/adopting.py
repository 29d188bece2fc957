"""Adoption of an index file: a small one in a thread, a large one in a process of its own.

A large index takes a second of the interpreter and hundreds of megabytes; a process takes both from
nobody, gives them back at its end, and is bounded in time and memory whatever the file holds.
"""

from __future__ import annotations

import signal
from concurrent.futures import Executor
from pathlib import Path

from snapshotter.chunks.offload import offload
from snapshotter.errors import NoSpaceError, RefusedError, UnavailableError
from snapshotter.image import adopter
from snapshotter.image.adopter import Order, adopt_in_place
from snapshotter.image.adoption import INDEX_BYTES, Claim
from snapshotter.image.child import run_child

SMALL_BYTES = 1024 * 1024
"""So long an index costs a thread half as much as a process's start, which holds up nobody."""

_MEMORY_LEAST = 512 * 1024 * 1024
_MEMORY_FACTOR = 32
_MEMORY_MOST = 3 * 1024 * 1024 * 1024


async def adopt_file(
    path: Path, claim: Claim, *, executor: Executor | None = None, small_bytes: int = SMALL_BYTES
) -> None:
    """Check the index at ``path`` as adopt() does; when this returns, it can be used.

    The file is replaced, durably, where the image in it has to be written anew. RefusedError names
    the fault; NoSpaceError, UnavailableError and DeadlineError are of the node, not of the index.
    How many run at once is the caller's to bound.
    """
    try:
        length_bytes = path.stat().st_size
    except OSError as error:
        raise UnavailableError(f"{path} can't be read: {error.strerror}") from error
    if length_bytes > INDEX_BYTES:
        raise RefusedError(f"{path}: {length_bytes} bytes, and no index has over {INDEX_BYTES}")
    if length_bytes <= small_bytes:
        await offload(executor, adopt_in_place, path, claim)
    else:
        await _apart(path, claim, length_bytes)


async def _apart(path: Path, claim: Claim, length_bytes: int) -> None:
    memory_bytes = min(_MEMORY_MOST, _MEMORY_LEAST + _MEMORY_FACTOR * length_bytes)
    order = Order(path, claim, memory_bytes)
    status, said = await run_child(
        adopter.__name__, order.encode(), what=str(path), timeout_s=adopter.TIMEOUT_S
    )
    _judge(path, status, said)


def _judge(path: Path, status: int, said: str) -> None:
    if status == 0:
        return
    if status == adopter.REFUSED:
        raise RefusedError(said)
    if status == adopter.FULL:
        raise NoSpaceError(said)
    if status == -signal.SIGXCPU:
        raise RefusedError(f"{path}: it takes more than {adopter.TIMEOUT_S:g} s to look at")
    raise UnavailableError(f"{path} could not be checked (status {status}): {said[-300:]}")
