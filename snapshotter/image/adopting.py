"""Adoption of an index file: a small one in a thread, a large one in a process of its own.

A large index takes a second of the interpreter and hundreds of megabytes; a process takes both from
nobody, gives them back at its end, and is bounded in time and memory whatever the file holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from snapshotter.content import Digest
from snapshotter.errors import DeadlineError, NoSpaceError, RefusedError, UnavailableError
from snapshotter.image.adoption import INDEX_BYTES, Claim, adopt
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_writer import replace_index

SMALL_BYTES = 2 * 1024 * 1024
"""So long an index costs a thread about a tenth of a second, as much as a process's start."""

_TIMEOUT_S = 120.0
_MEMORY_BYTES = 512 * 1024 * 1024
_MEMORY_FACTOR = 32
_REFUSED, _FULL, _FAILED = 3, 4, 5
_SAID_BYTES = 16 * 1024
_ROOT = Path(__file__).resolve().parents[2]


async def adopt_file(
    path: Path, claim: Claim, *, executor: Executor | None = None, small_bytes: int = SMALL_BYTES
) -> None:
    """Check the index at ``path`` as adopt() does; when this returns, it can be used.

    The file is replaced, durably, where the image in it has to be written anew. RefusedError names
    the fault; NoSpaceError, UnavailableError and DeadlineError are of the node, not of the index.
    """
    loop = asyncio.get_running_loop()
    try:
        length_bytes = path.stat().st_size
    except OSError as error:
        raise UnavailableError(f"{path} can't be read: {error.strerror}") from error
    if length_bytes > INDEX_BYTES:
        raise RefusedError(f"{path}: {length_bytes} bytes, and no index has over {INDEX_BYTES}")
    if length_bytes <= small_bytes:
        await loop.run_in_executor(executor, _adopt, path, claim)
    else:
        await _apart(path, claim, length_bytes)


def _adopt(path: Path, claim: Claim) -> None:
    index = LayerIndex.open(path)
    adopted = adopt(index.data, claim, where=str(path))
    if adopted is not index.data:
        replace_index(path, adopted)


@dataclass(frozen=True, slots=True)
class _Order:
    """What the other process is told, as JSON in its only argument."""

    path: Path
    claim: Claim
    memory_bytes: int

    def encode(self) -> str:
        claim = self.claim
        numbers = [claim.blob_bytes, claim.windows_bytes, claim.chunk_bytes, self.memory_bytes]
        return json.dumps([str(self.path), str(claim.layer), str(claim.diff_id), *numbers])

    @classmethod
    def decode(cls, text: str) -> _Order:
        path, layer, diff_id, blob, windows, chunk, memory_bytes = json.loads(text)
        claim = Claim(Digest.parse(layer), Digest.parse(diff_id), blob, windows, chunk)
        return cls(Path(path), claim, memory_bytes)


async def _apart(path: Path, claim: Claim, length_bytes: int) -> None:
    order = _Order(path, claim, _MEMORY_BYTES + _MEMORY_FACTOR * length_bytes)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # not what lies in the working directory
            "-m",
            __name__,
            order.encode(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])},
            start_new_session=True,
        )
    except OSError as error:
        raise UnavailableError(f"{path} can't be checked: {error.strerror or error}") from error
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            assert process.stderr is not None
            said = (await process.stderr.read(_SAID_BYTES)).decode("utf-8", "replace").strip()
            status = await process.wait()
    except TimeoutError:
        raise DeadlineError(f"{path} is not checked after {_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    _judge(path, status, said)


def _judge(path: Path, status: int, said: str) -> None:
    if status == 0:
        return
    if status == _REFUSED:
        raise RefusedError(said)
    if status == _FULL:
        raise NoSpaceError(said)
    if status == -signal.SIGXCPU:
        raise RefusedError(f"{path}: it takes more than {_TIMEOUT_S:g} s to look at")
    raise UnavailableError(f"{path} could not be checked (status {status}): {said[-300:]}")


def main(text: str) -> int:
    """The other process: its exit status, the fault on stderr."""
    order = _Order.decode(text)
    gc.disable()  # nothing of a tree goes before its end
    cpu_s = int(_TIMEOUT_S)
    resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    try:
        _adopt(order.path, order.claim)
    except RefusedError as error:
        return _say(str(error), _REFUSED)
    except NoSpaceError as error:
        return _say(str(error), _FULL)
    except MemoryError:
        return _say(f"{order.path}: it takes over {order.memory_bytes} bytes of memory", _REFUSED)
    except Exception as error:  # a fault of ours: the node goes on without this index
        return _say(repr(error), _FAILED)
    return 0


def _say(fault: str, status: int) -> int:
    sys.stderr.write(fault[:_SAID_BYTES])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
