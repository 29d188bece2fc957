"""Readers of one file side by side, as a program: `python -m bench.readers FILE LENGTH COUNT N`.

COUNT pieces at random places of the first LENGTH bytes are read by N threads, each piece once; it
prints the seconds from the first read to the last. The same places whatever N is.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path

from bench.bed.process import BedError, run

ROOT = Path(__file__).resolve().parents[1]
PIECE_BYTES = 64 << 10
LIMIT_S = 300.0


def timed_readers(path: Path, length: int, count: int, readers: int) -> float:
    """Seconds that ``readers`` threads of another process take for ``count`` pieces."""
    words = [sys.executable, "-B", "-m", "bench.readers", str(path)]
    words += [str(number) for number in (length, count, readers)]
    said = run(words, timeout_s=LIMIT_S, env={"PYTHONPATH": str(ROOT)})
    try:
        return float(said)
    except ValueError as error:
        raise BedError(f"the readers said {said[:200]!r}") from error


def pieces(length: int, count: int) -> list[int]:
    """Offsets of different pieces, in an order that no readahead foresees."""
    whole = length // PIECE_BYTES
    numbers = random.Random(5).sample(range(whole), min(count, whole))
    return [number * PIECE_BYTES for number in numbers]


def main() -> None:
    name, length, count, readers = sys.argv[1], *map(int, sys.argv[2:])
    places = pieces(length, count)
    descriptor = os.open(name, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    failed: list[int] = []
    gate = threading.Barrier(readers + 1)

    def read(mine: list[int]) -> None:
        buffer = bytearray(PIECE_BYTES)
        gate.wait()
        failed.extend(place for place in mine if os.preadv(descriptor, [buffer], place) <= 0)

    threads = [threading.Thread(target=read, args=(places[n::readers],)) for n in range(readers)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failed:
        sys.exit(f"{name}: nothing was read at {failed[:3]}")
    print(f"{seconds:.6f}")


if __name__ == "__main__":
    main()
