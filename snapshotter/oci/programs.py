"""Runs the small programs that know credentials, with every bound that such a guest needs.

Each gets a time limit and an output limit, runs in a session of its own and is killed with all
its children when it exceeds one. Its output may be secret: it is never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.errors import DeadlineError, UnavailableError
from snapshotter.tasks import end_all

_OUTPUT_LIMIT_BYTES = 1024 * 1024
_AT_ONCE = 4
_REAP_S = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended. ``error`` is the end of its stderr, for a message."""

    status: int
    output: bytes = field(repr=False)
    error: str


class ProgramRunner:
    """Runs programs, a few at once."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._environment = {"HOME": str(Path.home()), **given}  # services often have no HOME
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(
        self,
        command: Sequence[str],
        stdin: bytes,
        *,
        timeout_s: float,
        extra_environment: Mapping[str, str] | None = None,
    ) -> Finished:
        """Run to the end. UnavailableError if it can't be started or says too much,
        DeadlineError if it takes longer than ``timeout_s``."""
        name = Path(command[0]).name
        async with self._slots:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={**self._environment, **(extra_environment or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise UnavailableError(f"program {name}: {error.strerror or error}") from error
            try:
                async with asyncio.timeout(timeout_s):
                    finished = await _converse(process, stdin, name)
            except UnavailableError as error:
                await _kill(process)
                raise UnavailableError(f"program {name}: {error}") from None
            except TimeoutError:
                await _kill(process)
                raise DeadlineError(f"program {name}: not done after {timeout_s:g} s") from None
            except BaseException:
                await asyncio.shield(_kill(process))
                raise
            return finished


async def _converse(process: asyncio.subprocess.Process, stdin: bytes, name: str) -> Finished:
    assert process.stdin and process.stdout and process.stderr
    # It may have ended without reading: asyncio says ConnectionError then, uvloop RuntimeError.
    with contextlib.suppress(ConnectionError, RuntimeError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()
    readers = [asyncio.create_task(_read(s)) for s in (process.stdout, process.stderr)]
    try:
        output, error = await asyncio.gather(*readers)
    finally:
        await end_all(readers)
    status = await process.wait()
    return Finished(status, output, error.decode("utf-8", "replace").strip()[-300:])


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All of it; UnavailableError as soon as it is too much."""
    data = b""
    while chunk := await stream.read(64 * 1024):
        data += chunk
        if len(data) > _OUTPUT_LIMIT_BYTES:
            raise UnavailableError(f"more than {_OUTPUT_LIMIT_BYTES} bytes of output")
    return data


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill it with its children, empty its pipes (an end is noticed only then), and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout and process.stderr
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REAP_S):
            for stream in (process.stdout, process.stderr):
                while await stream.read(64 * 1024):
                    pass
            await process.wait()
