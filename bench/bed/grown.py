"""Images of a size that is asked for: of so many small files, or of so many bytes.

Noise that repeats only after more than gzip looks back: it does not shrink, and making it is cheap.
The program of the tiny image is in each, so that a container of it can be started.
"""

from __future__ import annotations

import random
from pathlib import Path

from bench.bed.image import Image, build
from bench.bed.tiny import program_tree

FOLDER_FILES = 1000
FILE_BYTES = 1000
NOISE_BYTES = 64 << 20
LARGE_FILE_BYTES = 128 << 20
PIECE_BYTES = 1 << 20


def many_files(folder: Path, count: int) -> Image:
    """An image with ``count`` files of 1,000 bytes in folders of a thousand."""
    tree = folder / f"files{count}"
    noise = random.Random(count).randbytes(FILE_BYTES + count)
    for number in range(count):
        place = tree / "many" / f"d{number // FOLDER_FILES}"
        if number % FOLDER_FILES == 0:
            place.mkdir(parents=True)
        (place / f"file{number}").write_bytes(noise[number : number + FILE_BYTES])
    trees = [tree, program_tree(folder)]
    return build("bed/many", f"files{count}", trees, ["/program"], folder / "images", "gzip")


def many_bytes(folder: Path, total: int) -> Image:
    """An image with ``total`` bytes of noise, in files of at most 128 MiB."""
    tree = folder / f"bytes{total}"
    (tree / "large").mkdir(parents=True)
    random_bytes = random.Random(total)
    noise = random_bytes.randbytes(NOISE_BYTES)
    for number, start in enumerate(range(0, total, LARGE_FILE_BYTES)):
        left = min(LARGE_FILE_BYTES, total - start)
        with (tree / "large" / f"file{number:04}").open("wb") as file:
            while left:
                place = random_bytes.randrange(NOISE_BYTES - PIECE_BYTES)
                left -= file.write(noise[place : place + min(left, PIECE_BYTES)])
    trees = [tree, program_tree(folder)]
    return build("bed/large", f"bytes{total}", trees, ["/program"], folder / "images", "fast")
