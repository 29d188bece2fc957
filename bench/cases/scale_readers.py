"""From 1 reader to 64 of one file: random pieces, cold, of a layer that is complete and of one not.

Of the layer that is not complete only what is here is read: the guard answers each read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.bed.bed import drop_page_cache
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.growth import Growth
from bench.measure import Case, Result, Settings, alternate
from bench.mounted import large_files, mounted, sequential
from bench.progress import Progress
from bench.readers import timed_readers
from bench.scene import scene

USUAL, QUICK = (1, 2, 4, 8, 16, 32, 64), (1, 8)
LEAST_BYTES = 8 << 20
PIECES = 400
PRESENT_TARGET, COMPLETE_TARGET = 1 / 0.8, 1 / 0.97


def cold(path: Path, length: int, count: int, readers: int) -> float:
    drop_page_cache()
    return timed_readers(path, length, count, readers)


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    count = 40 if settings.quick else PIECES
    with scene(settings, image, Shape(0)) as starter:
        containerd = starter.containerd
        with say.step("pulling the image, forgetting its bytes, keeping its index"):
            starter.first_pull()
            starter.index_cold()
            containerd.pull(image.reference)
        for state, target in (("present", PRESENT_TARGET), ("complete", COMPLETE_TARGET)):
            growth = Growth(
                f"scale-readers-{state}",
                f"{count} random pieces of 64 KiB, cold, layer {state}: seconds",
                "readers",
                "s",
                "s",
                "overlayfs",
                {f"ember, {state}": (target, 0.0)},
            )
            if state == "complete":
                starter.all_local()
            with (
                mounted(containerd, image.reference, "overlayfs") as theirs,
                mounted(containerd, image.reference, "ember") as ours,
            ):
                name = large_files(theirs, LEAST_BYTES, 1)[0].relative_to(theirs)
                half = (theirs / name).stat().st_size // 2 & ~0xFFFF
                sequential([ours / name], half)
                for readers in map(int, settings.steps(USUAL, QUICK)):
                    say(f"{readers} readers of a layer that is {state}")
                    ways = {
                        f"ember, {state}": partial(cold, ours / name, half, count, readers),
                        "overlayfs": partial(cold, theirs / name, half, count, readers),
                    }
                    growth.add(readers, alternate(ways, settings.rounds, say))
            growth.into(result)
    return result


CASE = Case(
    "scale-readers",
    "1 to 64 readers of one file against overlayfs",
    run,
    "at least 0.97 of overlayfs's rate where the layer is complete, 0.8 where it is not",
)
