"""Images of 0.1 to 10 GB: seconds until ready, of a program that needs next to nothing of them.

What grows with the image is what has to be fetched before a start. The link has no limit: with one
the difference would only be larger. Above 1 GB one round each; what has no room on the disk is
left out, and that is said.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.bed.bed import BASE, Bed
from bench.bed.grown import many_bytes
from bench.bed.link import Shape
from bench.growth import Growth
from bench.measure import Case, Result, Settings
from bench.progress import Progress
from bench.scene import snapshotters
from bench.trial import Starter

USUAL, QUICK = (0.1, 0.3, 1.0, 3.0), (0.05, 0.1)
GB = 10**9
LARGE_GB = 1.0
# Blob, the registry's and containerd's copy, what is unpacked: so much room an image needs.
COPIES = 4
INDEXED_TARGET, FIRST_TARGET = 0.15, 1.0
INDEXED, FIRST, BASE_WAY = "ember, with index", "ember, first pull", "overlayfs"


def measure(starter: Starter, rounds: int, say: Progress) -> dict[str, list[float]]:
    """Seconds until ready of each way; the index is that of the first pull of the same round."""
    values: dict[str, list[float]] = {FIRST: [], INDEXED: [], BASE_WAY: []}
    for number in range(rounds):
        ways: list[tuple[str, Callable[[], float]]] = [
            (FIRST, lambda: starter.first_pull().ready_s),
            (INDEXED, lambda: starter.index_cold().ready_s),
        ]
        for name, way in ways:
            with say.step(f"{name}, round {number + 1} of {rounds}"):
                values[name].append(way())
        starter.forget()
        with say.step(f"{BASE_WAY}, round {number + 1} of {rounds}"):
            values[BASE_WAY].append(starter.overlayfs_once().ready_s)
    return values


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    growth = Growth(
        "scale-bytes",
        "Images of noise, a program that needs little: seconds until ready",
        "GB",
        "s",
        "s",
        BASE_WAY,
        {INDEXED: (INDEXED_TARGET, LARGE_GB), FIRST: (FIRST_TARGET, 0.0)},
    )
    BASE.mkdir(parents=True, exist_ok=True)
    for size in settings.steps(USUAL, QUICK):
        need, free = int(COPIES * size * GB), shutil.disk_usage(BASE).free
        if need > free:
            result.notes.append(
                f"{size:g} GB left out: {need / GB:.0f} GB needed, {free / GB:.0f} free."
            )
            say(result.notes[-1])
            continue
        with Bed(Shape(0), keeps=False) as bed:
            containerd, ember = snapshotters(bed, settings)
            with (
                tempfile.TemporaryDirectory(dir=bed.directory) as folder,
                say.step(f"an image of {size:g} GB"),
            ):
                image = many_bytes(Path(folder), int(size * GB))
                image.push(bed.registry)
            starter = Starter(bed, containerd, ember, image)
            rounds = settings.rounds if size <= LARGE_GB else 1
            growth.add(size, measure(starter, rounds, say))
    if max(growth.at, default=0.0) > LARGE_GB:
        result.notes.append(f"Above {LARGE_GB:g} GB: one round.")
    if growth.at:
        growth.into(result)
    return result


CASE = Case(
    "scale-bytes",
    "images of 0.1 to 10 GB (--points 0.1,1,10) until a program that needs little is ready",
    run,
    "with an index at most 0.15 of overlayfs from 1 GB on; without one never slower",
)
