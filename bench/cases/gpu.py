"""The start of an image with PyTorch and CUDA, 6 GB plain: what a large inference image costs.

Large: it is built from 2.6 GB of wheels in the first run, and needs 30 GB of disk while it runs.
The first pull is not among the ways: it is what `start` shows, only longer.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.bed.debian import gpu_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings
from bench.progress import Progress
from bench.scene import scene
from bench.trial import Row, Trial

COLD_TARGET, LOCAL_TARGET = 0.15, 1.05


def figures(rows: dict[str, Row]) -> list[Figure]:
    base, cold, local = (rows[name] for name in ("overlayfs", "index here", "all local"))
    columns = (("ready", "s", "ready_s", 1.0), ("fetched", "MB", "fetched_bytes", 1e6))
    found = []
    for title, unit, what, divisor in columns:
        ours, theirs = ([value / divisor for value in row.all(what)] for row in (cold, base))
        target = COLD_TARGET if what == "ready_s" else None
        name = f"index here: {title}"
        found.append(Figure.of(name, unit, ours, theirs, target, against="overlayfs"))
    ours, theirs = local.all("ready_s"), base.all("again_s")
    against = "overlayfs, all local"
    found.append(
        Figure.of("second start, cold cache", "s", ours, theirs, LOCAL_TARGET, against=against)
    )
    return found


def run(settings: Settings, say: Progress) -> Result:
    image = gpu_image(CACHE / "bed", say)
    shape = Shape(settings.rate_mbit, settings.delay_ms)
    with scene(settings, image, Shape(0)) as starter:
        with say.step("a first pull without a limit: the index comes here"):
            starter.first_pull()
        starter.bed.link.reshape(shape)
        ways: dict[str, Callable[[], Trial]] = {
            "overlayfs": starter.overlayfs,
            "index here": starter.index_cold,
            "all local": starter.all_local,
        }
        trials: dict[str, list[Trial]] = {name: [] for name in ways}
        for number in range(settings.rounds):
            for name, way in ways.items():
                if name == "all local":
                    starter.bed.link.reshape(Shape(0))  # how the rest came is not what is measured
                with say.step(f"{name}, round {number + 1} of {settings.rounds}"):
                    trials[name].append(way())
                starter.bed.link.reshape(shape)
    rows = {name: Row(name, tuple(found)) for name, found in trials.items()}
    raw = {name: row.document(rows["overlayfs"], image) for name, row in rows.items()}
    note = (
        f"{image.size / 1e9:.2f} GB gzip, {image.plain_size / 1e9:.2f} GB plain; {shape}; "
        f"{len(image.layers)} layers."
    )
    return Result(figures(rows), raw, [note])


CASE = Case(
    "gpu",
    "the start of an image with PyTorch and CUDA (6 GB), cold; best with --rate 1000",
    run,
    "at most 0.15 of overlayfs with an index here; the second start at most 1.05",
    large=True,
)
