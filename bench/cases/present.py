"""Reads of chunks that are here, of a layer that is not complete, against overlayfs.

Half of a large file has been read before, the rest of its layer is still in the registry: each
read from the disk raises an event that the guard answers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.bed.bed import drop_page_cache
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings, alternate
from bench.mounted import large_files, mounted, random_pages, sequential
from bench.progress import Progress
from bench.scene import scene

# At least 0.8 of overlayfs's rate, said of seconds.
TARGET = 1 / 0.8
LEAST_BYTES = 8 << 20
PAGES = 3000


def cold_sequential(path: Path, limit_bytes: int) -> float:
    drop_page_cache()
    return sequential([path], limit_bytes)[0]


def cold_random(path: Path, limit_bytes: int, pages: int) -> float:
    drop_page_cache()
    return sum(random_pages(path, pages, seed=2, limit_bytes=limit_bytes))


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    pages = 200 if settings.quick else PAGES
    with scene(settings, image, Shape(0)) as starter:
        bed, containerd = starter.bed, starter.containerd
        with say.step("pulling the image, forgetting its bytes, keeping its index"):
            starter.first_pull()
            starter.index_cold()
            containerd.pull(image.reference)
        with (
            mounted(containerd, image.reference, "overlayfs") as theirs,
            mounted(containerd, image.reference, "ember") as ours,
        ):
            large = large_files(theirs, LEAST_BYTES, 1)[0].relative_to(theirs)
            half = (theirs / large).stat().st_size // 2 & ~0xFFFF
            sequential([ours / large], half)
            before = bed.registry.sent_bytes()
            for title, work in (
                ("sequential", partial(cold_sequential, limit_bytes=half)),
                ("random 4 KiB", partial(cold_random, limit_bytes=half, pages=pages)),
            ):
                ways = {
                    "ember": partial(work, ours / large),
                    "overlayfs": partial(work, theirs / large),
                }
                values = alternate(ways, settings.rounds, say)
                result.raw[title] = values
                result.figures.append(
                    Figure.of(
                        title,
                        "s",
                        values["ember"],
                        values["overlayfs"],
                        TARGET,
                        against="overlayfs",
                    )
                )
            result.notes.append(
                f"{half / 1e6:.0f} MB of {large}; fetched meanwhile: "
                f"{bed.registry.sent_bytes() - before} bytes."
            )
    return result


CASE = Case(
    "present",
    "reads of present chunks of an incomplete layer against overlayfs",
    run,
    "at least 0.8 of overlayfs's rate",
)
