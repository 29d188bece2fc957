"""Reads of a layer that is wholly here, against containerd's overlayfs on the same disk.

Cold: the page cache is dropped before. Warm: the same again at once. Both sides are mounted the
whole time and read in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.bed.bed import drop_page_cache
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings, alternate
from bench.mounted import (
    cached_bytes,
    large_files,
    mounted,
    random_pages,
    sequential,
    timed_command,
)
from bench.progress import Progress
from bench.scene import scene

# At least 0.97 of overlayfs's rate, said of seconds.
TARGET = 1 / 0.97
CACHE_TARGET = 1.05
LARGE_BYTES = 1 << 20
FILES = 40
PAGES = 4000
PACKAGES = "pandas, scipy.stats, sklearn.linear_model, pyarrow, sympy"


def works(root: Path, pages: int) -> dict[str, Callable[[], float]]:
    """What is timed, by name; each returns seconds."""
    files = large_files(root, LARGE_BYTES, FILES)
    program = f"import {PACKAGES}"
    return {
        "sequential": lambda: sequential(files)[0],
        "random 4 KiB": lambda: sum(random_pages(files[0], pages, seed=1)),
        "find": partial(timed_command, ["find", root, "-xdev", "-printf", "%s %m %U\n"]),
        "import": partial(timed_command, ["chroot", root, "python3", "-B", "-c", program]),
    }


def cold(work: Callable[[], float]) -> float:
    drop_page_cache()
    return work()


def cache_per_byte(root: Path) -> float:
    """Bytes of page cache for each byte read."""
    files = large_files(root, LARGE_BYTES, FILES)
    drop_page_cache()
    before = cached_bytes()
    _, total = sequential(files)
    return (cached_bytes() - before) / total


def compare(ours: Path, theirs: Path, settings: Settings, say: Progress) -> Result:
    result = Result()
    pages = 200 if settings.quick else PAGES
    pair = {"ember": works(ours, pages), "overlayfs": works(theirs, pages)}
    for name in pair["ember"]:
        for state in ("cold", "warm"):
            ways = {
                side: partial(cold, found[name]) if state == "cold" else found[name]
                for side, found in pair.items()
            }
            if state == "warm":
                for way in ways.values():
                    way()
            values = alternate(ways, settings.rounds, say)
            result.raw[f"{name} {state}"] = values
            mine, other = values["ember"], values["overlayfs"]
            title = f"{name}, {state}"
            result.figures.append(Figure.of(title, "s", mine, other, TARGET, against="overlayfs"))
    result.figures.append(
        Figure("page cache for each byte read", "bytes", cache_per_byte(ours), target=CACHE_TARGET)
    )
    return result


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    with scene(settings, image, Shape(0)) as starter:
        containerd = starter.containerd
        with say.step("pulling the image twice"):
            containerd.pull(image.reference)
            starter.first_pull()
            starter.daemon().complete()
        with (
            mounted(containerd, image.reference, "overlayfs") as theirs,
            mounted(containerd, image.reference, "ember") as ours,
        ):
            return compare(ours, theirs, settings, say)


CASE = Case(
    "reads",
    "reads of a complete layer against overlayfs",
    run,
    "at least 0.97 of overlayfs's rate; at most 1.05 bytes of page cache for each byte read",
)
