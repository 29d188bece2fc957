"""A module of ours, run in a process of its own: what it says on stdout, and how it ends.

What works there takes the interpreter from nobody and gives its memory back. It ends with whoever
waits for it; what it may take is for itself to limit (apart.py), before it does anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from snapshotter.errors import DeadlineError, UnavailableError

SAID_BYTES = 16 * 1024
"""So much of what it says is heard."""
_ROOT = Path(__file__).resolve().parents[2]


async def run_child(
    module: str, argument: str, *, what: str, timeout_s: float | None = None
) -> tuple[int, str]:
    """Its exit status (below 0: the signal that ended it) and its words. ``what`` it is about is
    named by UnavailableError, if it can't be started, and by DeadlineError."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # not what lies in the working directory
            "-m",
            module,
            argument,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])},
            start_new_session=True,
        )
    except OSError as error:
        reason = error.strerror or error
        raise UnavailableError(f"{what} can't be checked: no process ({reason})") from error
    try:
        async with asyncio.timeout(timeout_s):
            said = await _heard(process)
            return await process.wait(), said
    except TimeoutError:
        raise DeadlineError(f"{what} is not checked after {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


async def _heard(process: asyncio.subprocess.Process) -> str:
    """All that it says, as far as it is heard; it never waits for a listener."""
    assert process.stdout is not None
    said = b""
    while piece := await process.stdout.read(SAID_BYTES):
        said += piece[: SAID_BYTES - len(said)]
    return said.decode("utf-8", "replace").strip()
