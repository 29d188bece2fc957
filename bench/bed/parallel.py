"""A bare download on the link: blobs in ranges over several connections, the bytes thrown away.

Run in the link's namespace (`python -m bench.bed.parallel HOST CONNECTIONS PATH LENGTH ...`); it
prints the seconds from the first request to the last byte. Nothing is hashed or kept: what else a
snapshotter does is what it is compared by.
"""

from __future__ import annotations

import http.client
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

from bench.bed.image import Image
from bench.bed.link import Link
from bench.bed.process import BedError, run
from bench.bed.registry import HOST

ROOT = Path(__file__).resolve().parents[2]
CONNECTIONS = 8
RANGE_BYTES = 8 << 20
PIECE_BYTES = 1 << 20
LIMIT_S = 1800.0

Range = tuple[str, int, int]


def download(link: Link, image: Image, connections: int = CONNECTIONS) -> float:
    """Seconds that all layers of an image take."""
    words = [*link.enter(), sys.executable, "-B", "-m", "bench.bed.parallel", HOST]
    words.append(str(connections))
    for layer in image.layers:
        words += [f"/v2/{image.name}/blobs/{layer.digest}", str(layer.size)]
    said = run(words, timeout_s=LIMIT_S, env={"PYTHONPATH": str(ROOT)})
    try:
        return float(said)
    except ValueError as error:
        raise BedError(f"the bare download said {said[:200]!r}") from error


def ranges(blobs: list[tuple[str, int]]) -> list[Range]:
    """The pieces of all blobs, of RANGE_BYTES but for the last of each."""
    return [
        (path, offset, min(RANGE_BYTES, length - offset))
        for path, length in blobs
        for offset in range(0, length, RANGE_BYTES)
    ]


def fetch(host: str, waiting: SimpleQueue[Range]) -> None:
    """Fetch ranges over one connection until none is left."""
    connection = http.client.HTTPConnection(host, timeout=60)
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    while True:
        try:
            path, offset, length = waiting.get_nowait()
        except Empty:
            return
        connection.request("GET", path, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        answer = connection.getresponse()
        left = length
        while left and (got := answer.readinto(buffer[: min(left, PIECE_BYTES)])):
            left -= got
        if answer.status != 206 or left:
            raise BedError(f"{path}: {answer.status}, {left} of {length} bytes are missing")
        answer.read()  # the connection is free for the next only at the end


def main() -> None:
    host, connections, *rest = sys.argv[1:]
    blobs = list(zip(rest[::2], map(int, rest[1::2]), strict=True))
    waiting: SimpleQueue[Range] = SimpleQueue()
    for piece in ranges(blobs):
        waiting.put(piece)
    start = time.perf_counter()
    with ThreadPoolExecutor(int(connections)) as pool:
        for done in [pool.submit(fetch, host, waiting) for _ in range(int(connections))]:
            done.result()
    print(f"{time.perf_counter() - start:.6f}")


if __name__ == "__main__":
    main()
