"""Readers of lazy images: processes of their own that check every byte; and images to read."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.cases.images import ImageCase, as_it_is, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.node import Node

READ_S = 60.0
READER = """\
import hashlib, os, random, sys
path, seed, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3]
fd = os.open(path, os.O_RDONLY)
size = os.fstat(fd).st_size
parts = list(range(0, size, 16384))
random.Random(seed).shuffle(parts)
data = bytearray(size)
print("reading", flush=True)
for at in parts:
    piece = os.pread(fd, 16384, at)
    data[at : at + len(piece)] = piece
found = hashlib.sha256(data).hexdigest()
sys.exit(0 if found == wanted else f"{path}: wrong bytes: {found}")
"""


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def noisy(name: str, count: int = 2, size: int = 1_500_000) -> ImageCase:
    """An image of one gzip and one plain layer with files that don't pack."""
    files = {f"{name}-{n}": noise(n + len(name), size) for n in range(count)}
    rows = {key: is_file(data) for key, data in files.items()}
    names = list(files)
    halves = names[: count // 2], names[count // 2 :]
    plains = [layer(*(file(key.encode(), files[key]) for key in half)) for half in halves]
    return image(name, [gzipped(plains[0]), as_it_is(plains[1])], rows)


def sha256_of(case: ImageCase, name: str) -> str:
    row = case.rows[name]
    return str(row.sha256)


def reader(path: Path, wanted: str, seed: int = 1) -> subprocess.Popen[str]:
    """A process that reads a file in odd order and checks it; it has begun when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(path), str(seed), wanted],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    return process


def ended_well(process: subprocess.Popen[str], limit_s: float = READ_S) -> str:
    """ "" if the reader saw what it should have; else what it said."""
    try:
        _, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"still reading after {limit_s} s"
    return said if process.returncode else ""


def lazily(at: Node, case: ImageCase) -> None:
    """Have the image's index here, and none of its bytes."""
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    reply = at.drop(case.reference)
    assert not reply.kept, reply.kept


def told_of_waiting(at: Node) -> str:
    """What `ember status` says of the reads that wait just now."""
    return "; ".join(
        f"{one['reads']} of {one['view']}: {one['why']}" for one in at.status()["waiting"]
    )
