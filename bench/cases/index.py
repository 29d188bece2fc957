"""Index size, build rate and opening: a real image's layers, and one layer of very many entries.

The rate is compared with the least that must be done to a layer anyway: decompress it and hash it
twice, compressed and plain, with the same libraries and on the same file.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import statistics
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.bed.bed import BASE
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.image import blob_path, sha256_file
from bench.measure import Case, Figure, Result, Settings, alternate
from bench.progress import Progress
from snapshotter.content import Digest
from snapshotter.image.adopting import adopt_file
from snapshotter.image.adoption import Claim
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import LayerIndexer

BLOCK_BYTES = 1 << 20
ENTRIES = 200_000
# What a mount needs: 0.1 % of the plain layer and 110 bytes an entry; windows: 1.5 % of it.
METADATA_SHARE = 0.001
ENTRY_BYTES = 110
WINDOWS_SHARE = 0.015
# "Milliseconds", whatever an index holds, whether its file is in the page cache or not.
OPEN_MS = 10.0


def index_layer(blob: Path, layer: Digest, diff_id: Digest | None, folder: Path) -> LayerIndex:
    """Index one blob from a file, as the daemon does from a stream."""
    with (
        blob.open("rb") as file,
        LayerIndexer(
            layer,
            diff_id,
            blob_bytes=blob.stat().st_size,
            sink=lambda offset, data: None,
            directory=folder,
        ) as indexer,
    ):
        while block := file.read(BLOCK_BYTES):
            indexer.feed(block)
        return indexer.finish()


def bare_pass(blob: Path) -> None:
    """Decompress and hash both forms: what no first pull can leave out."""
    stored, plain = hashlib.sha256(), hashlib.sha256()
    inflate = zlib.decompressobj(wbits=31)
    with blob.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            stored.update(block)
            plain.update(inflate.decompress(block))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def many_entries(path: Path, count: int) -> None:
    """A plain layer with ``count`` small files in folders of 1,000."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(count):
            if number % 1000 == 0:
                folder = tarfile.TarInfo(f"d{number // 1000}")
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(folder)
            file = tarfile.TarInfo(f"d{number // 1000}/file{number}")
            file.size = 10
            archive.addfile(file, io.BytesIO(b"0123456789"))


def sizes(folder: Path, index: LayerIndex, name: str) -> list[Figure]:
    """Figures of one layer's index: what a mount needs, and the windows."""
    stem = folder / index.layer.hex
    needed = stem.with_suffix(".idx").stat().st_size
    windows = stem.with_suffix(".win")
    allowed = METADATA_SHARE * index.view_bytes + ENTRY_BYTES * index.entry_count
    figures = [
        Figure(f"{name}: index", "bytes", needed, allowed, 1.0, against="allowed"),
    ]
    if windows.exists():
        allowed = WINDOWS_SHARE * index.view_bytes
        size = windows.stat().st_size
        figures.append(Figure(f"{name}: windows", "bytes", size, allowed, 1.0, against="allowed"))
    return figures


def forgotten(path: Path) -> None:
    """Have nothing of a file in the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def openings(path: Path, name: str, rounds: int) -> list[Figure]:
    """How long an index takes to open and verify; and to check as one that others made."""
    opened = timed(lambda: LayerIndex.open(path))
    opened()
    warm = statistics.median(opened() for _ in range(rounds))
    cold = []
    for _ in range(rounds):
        forgotten(path)
        cold.append(opened())
    index = LayerIndex.open(path)
    claim = Claim(index.layer, index.diff_id, index.blob_bytes, index.windows_bytes)
    checked = timed(lambda: asyncio.run(adopt_file(path, claim)))()
    return [
        Figure(f"{name}: open, page cache warm", "ms", warm * 1e3, target=OPEN_MS),
        Figure(
            f"{name}: open, page cache cold", "ms", statistics.median(cold) * 1e3, target=OPEN_MS
        ),
        Figure(
            f"{name}: check as a foreign index, entries", "entries/s", index.entry_count / checked
        ),
    ]


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    BASE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BASE.parent, prefix="ember-index-") as name:
        folder = Path(name)
        for position, layer in enumerate(image.layers[:2]):
            title = ("base layer", "wheels layer")[position]
            blob = blob_path(image.folder, layer.digest)
            digest, diff_id = Digest.parse(layer.digest), Digest.parse(layer.diff_id)
            ways = {
                "index": timed(partial(index_layer, blob, digest, diff_id, folder)),
                "bare": timed(partial(bare_pass, blob)),
            }
            values = alternate(ways, settings.rounds, say)
            result.raw[title] = values
            rate = {
                way: [layer.plain_size / 1e6 / seconds for seconds in found]
                for way, found in values.items()
            }
            against = "inflate and two SHA-256"
            result.figures.append(
                Figure.of(
                    f"{title}: build rate",
                    "plain MB/s",
                    rate["index"],
                    rate["bare"],
                    against=against,
                )
            )
            result.figures += sizes(folder, index_layer(blob, digest, diff_id, folder), title)
        count = ENTRIES // 20 if settings.quick else ENTRIES
        blob = folder / "many.tar"
        many_entries(blob, count)
        digest = Digest.parse(sha256_file(blob))
        seconds = timed(partial(index_layer, blob, digest, None, folder))()
        result.figures.append(
            Figure(f"{count:,} entries: build rate", "entries/s", count / seconds)
        )
        index = index_layer(blob, digest, None, folder)
        result.figures += sizes(folder, index, f"{count:,} entries")
        result.figures += openings(Path(index.where), f"{count:,} entries", max(3, settings.rounds))
    return result


CASE = Case(
    "index",
    "size of a layer's index and how fast it is built",
    run,
    "0.1 % of the plain layer and 110 bytes an entry; windows 1.5 %; none for the rate",
)
