"""Many containers of one image at once, each alive until all are ready; many readers of one file.

What is started here is ended here, whatever happens.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time

from bench.bed.containerd import Containerd
from bench.bed.process import BedError

# So many starts are under way at once: more wait for each other in containerd.
STARTING = 16
READY = b"ready"
LIMIT_S = 900.0
END_S = 60.0
WAITS = "print('ready', flush=True); import sys; sys.stdin.read()"
COMMAND = ("python3", "-B", "-c", WAITS)


class Crowd:
    """Containers that say `ready` and then wait for the end of their standard input."""

    def __init__(self, containerd: Containerd, reference: str, snapshotter: str) -> None:
        self._containerd = containerd
        self._words = ["run", "--rm", "--snapshotter", snapshotter]
        self._words += ["--fifo-dir", str(containerd.directory / "fifo"), reference]
        self._name = f"{containerd.namespace}-{snapshotter}-{time.monotonic_ns()}"
        self._log = containerd.directory / "crowd.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int, command: tuple[str, ...] = COMMAND) -> float:
        """Start ``count`` of them; seconds until the last was ready."""
        start = time.monotonic()
        with selectors.DefaultSelector() as waiting, self._log.open("ab") as errors:
            ready = begun = 0
            while ready < count:
                while begun < count and begun - ready < STARTING:
                    process = self._one(begun, command, errors.fileno())
                    if process.stdout is None:
                        raise BedError("no pipe to ctr")
                    waiting.register(process.stdout, selectors.EVENT_READ)
                    begun += 1
                for key, _ in waiting.select(LIMIT_S - (time.monotonic() - start)):
                    # One line and no more comes before its standard input ends.
                    line = os.read(key.fd, 4096)
                    if READY not in line:
                        said = self._log.read_text(errors="replace")[-1000:]
                        raise BedError(f"a container ended before it was ready: {line!r} {said}")
                    waiting.unregister(key.fileobj)
                    ready += 1
                if time.monotonic() - start >= LIMIT_S:
                    raise BedError(f"{ready} of {count} containers are ready after {LIMIT_S:.0f} s")
        return time.monotonic() - start

    def _one(self, number: int, command: tuple[str, ...], errors: int) -> subprocess.Popen[bytes]:
        words = self._containerd.command(*self._words, f"{self._name}-{number}", *command)
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Let all of them end; those that do not are killed, and the bed ends their containers."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for process in self._processes:
                process.kill()
        self.end()
