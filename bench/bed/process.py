"""Processes of the bed: each with a log of its own, and gone when the bed goes.

A process is started with a death signal, so that even a bed killed with -9 leaves none of its own
servers behind (containers and their shims outlive it on purpose: leftovers.py clears those).
Start processes from the main thread only: the kernel ties the death signal to the starting thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STOP_S = 10.0
POLL_S = 0.02
SHOWN_BYTES = 4000


class BedError(Exception):
    """A part of the bed does not work; the message has the command and the end of its output."""


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
    stdin: bytes | None = None,
) -> str:
    """Run a command to its end and return what it printed; BedError when it fails or hangs."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=timeout_s,
            env=None if env is None else os.environ | env,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BedError(f"{' '.join(words)}: no end after {timeout_s:.0f} s") from error
    except FileNotFoundError as error:
        raise BedError(f"{words[0]}: not installed; `make deps` installs it") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-SHOWN_BYTES:].decode(errors="replace").strip()
        raise BedError(f"{' '.join(words)}: exit status {done.returncode}: {said}")
    return done.stdout.decode(errors="replace")


class Server:
    """A long-running process of the bed; ``stop`` ends it and everything in its session."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if env is None else os.environ | env,
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until ``ready()``; BedError with the end of the log if it dies or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None:
                raise BedError(f"{self.name} ended ({self.process.returncode}): {self.tail()}")
            if time.monotonic() > deadline:
                raise BedError(f"{self.name} is not ready after {timeout_s:.0f} s: {self.tail()}")
            time.sleep(POLL_S)

    def tail(self) -> str:
        """The last lines of the log."""
        return self.log.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill -9, as a crash would; only the process itself."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """SIGTERM, and SIGKILL for the whole session when that was not enough."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
