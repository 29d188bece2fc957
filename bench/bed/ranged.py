"""A bare client on the link: one kept connection, ranged GETs, the seconds of each.

Run in the link's namespace (`python -m bench.bed.ranged HOST PATH`); it reads lines of
`offset length` and answers each with the seconds from the request to the last byte.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.bed.link import Link
from bench.bed.process import BedError

ROOT = Path(__file__).resolve().parents[2]


class RangedClient:
    """The client as a child process; ``get`` returns the seconds that one range took."""

    def __init__(self, link: Link, host: str, path: str) -> None:
        words = [*link.enter(), sys.executable, "-m", "bench.bed.ranged", host, path]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )

    def get(self, offset: int, length: int) -> float:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise BedError("no pipe to the bare client")
        process.stdin.write(f"{offset} {length}\n")
        answer = process.stdout.readline()
        if not answer.strip():
            raise BedError(f"the bare client ended ({process.poll()})")
        return float(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    host, path = sys.argv[1:]
    connection = http.client.HTTPConnection(host, timeout=60)
    for line in sys.stdin:
        offset, length = map(int, line.split())
        start = time.perf_counter()
        connection.request("GET", path, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        answer = connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 206 or len(body) != length:
            sys.exit(f"{path}: {answer.status} with {len(body)} bytes")
        print(f"{seconds:.9f}", flush=True)


if __name__ == "__main__":
    main()
