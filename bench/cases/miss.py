"""Added latency of one miss: a page of a chunk that is not here, against a bare ranged GET.

Same registry, same link without a limit, the very range that the miss needs; the two take turns,
and nothing is read ahead beside them. The file is noise: its gzip form is as large as its plain.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.bed.bed import Bed
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.bed.ranged import RangedClient
from bench.bed.registry import HOST
from bench.bed.tiny import tiny_image
from bench.measure import Case, Figure, Result, Settings, percentile
from bench.mounted import PAGE_BYTES, mounted
from bench.progress import Progress
from bench.scene import snapshotters
from bench.trial import Starter
from snapshotter.content import Digest
from snapshotter.image.decode import plan
from snapshotter.image.index import LayerIndex

NOISE_BYTES = 192 << 20
# Two misses never share a chunk, nor what is between two checkpoints of a gzip layer.
APART_BYTES = 2 << 20
MISSES = 80
ADDED_MS = 1.0
WARM_UP = 5
SILENCE_S = 0.03
# The file's own header and that of its folder, before its bytes in the layer's tar.
HEADER_BYTES = 1024


def miss(descriptor: int, offset: int) -> float:
    start = time.perf_counter()
    os.pread(descriptor, PAGE_BYTES, offset)
    return time.perf_counter() - start


def wait_for_silence(bed: Bed) -> None:
    """Wait until nothing is read ahead any more: it must not run beside what is timed."""
    before = -1
    while (now := bed.registry.sent_bytes()) != before:
        before = now
        time.sleep(SILENCE_S)


def compare(
    bed: Bed, image: Image, path: Path, index: LayerIndex, misses: int
) -> tuple[list[float], list[float], int]:
    """Seconds of misses and of bare GETs of the same bytes, in turn; the median length."""
    places = list(range(APART_BYTES, path.stat().st_size - APART_BYTES, APART_BYTES))
    random.Random(3).shuffle(places)
    ours, theirs, lengths = [], [], []
    url = f"/v2/{image.name}/blobs/{index.layer}"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for place in places[:WARM_UP]:  # connections, tokens, code
            miss(descriptor, place)
        with RangedClient(bed.link, HOST, url) as client:
            client.get(0, PAGE_BYTES)
            for place in places[WARM_UP : WARM_UP + misses]:
                (span,) = plan(index, [(place + HEADER_BYTES) // index.chunk_bytes])
                wait_for_silence(bed)
                ours.append(miss(descriptor, place))
                wait_for_silence(bed)
                theirs.append(client.get(span.in_offset, span.length_bytes))
                lengths.append(span.length_bytes)
    finally:
        os.close(descriptor)
    return ours, theirs, int(statistics.median(lengths))


def figures(title: str, ours: list[float], theirs: list[float], length: int) -> list[Figure]:
    middle, bare = 1000 * statistics.median(ours), 1000 * statistics.median(theirs)
    high, bare_high = 1000 * percentile(ours, 0.9), 1000 * percentile(theirs, 0.9)
    against = f"bare GET of {length / 1024:.0f} KiB"
    quartiles = [
        (1000 * percentile(seen, 0.25), 1000 * percentile(seen, 0.75)) for seen in (ours, theirs)
    ]
    return [
        Figure(
            f"{title}: one miss p50",
            "ms",
            middle,
            bare,
            against=against,
            spread=quartiles[0],
            theirs_spread=quartiles[1],
        ),
        Figure(f"{title}: one miss p90", "ms", high, bare_high, against=against),
        Figure(f"{title}: added p50", "ms", middle - bare, target=ADDED_MS),
    ]


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    misses = 10 if settings.quick else MISSES
    with Bed(Shape(0)) as bed, tempfile.TemporaryDirectory(dir=bed.directory) as folder:
        containerd, ember = snapshotters(bed, settings)
        for compression in ("plain", "gzip"):
            with say.step(f"a {compression} image of noise, its index here, its bytes not"):
                image = tiny_image(
                    Path(folder) / compression, bytes_each=NOISE_BYTES, compression=compression
                )
                image.push(bed.registry)
                starter = Starter(bed, containerd, ember, image)
                starter.first_pull()
                starter.index_cold()
            with (
                mounted(containerd, image.reference, "ember") as root,
                say.step(f"{misses} misses and as many bare GETs"),
            ):
                noise = root / "data" / "noise1"
                layer = Digest.parse(image.layers[-1].digest)
                index = LayerIndex.open(ember.root / "index" / f"{layer.hex}.idx", layer=layer)
                ours, theirs, length = compare(bed, image, noise, index, misses)
            result.figures += figures(compression, ours, theirs, length)
            result.raw[compression] = {"miss_s": ours, "get_s": theirs, "needed_bytes": length}
    result.notes.append("In brackets: the quartiles of all misses.")
    return result


CASE = Case(
    "miss",
    "added latency of one miss over a bare ranged GET",
    run,
    "at most 1 ms added at the median",
)
