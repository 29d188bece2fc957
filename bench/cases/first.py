"""A first pull without an index on a fast link, where the processor is what holds it up.

Ember streams the layers once, hashes, inflates and indexes them; containerd fetches, hashes,
inflates and writes file by file. Both until the container is ready.
"""

from __future__ import annotations

from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings, alternate
from bench.progress import Progress
from bench.scene import scene

TARGET = 0.5


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    with scene(settings, image, Shape(0)) as starter:

        def ember() -> float:
            ready_s = starter.first_pull().ready_s
            starter.forget()
            return ready_s

        def overlayfs() -> float:
            return starter.overlayfs_once().ready_s

        values = alternate({"ember": ember, "overlayfs": overlayfs}, settings.rounds, say)
    figure = Figure.of(
        "ready", "s", values["ember"], values["overlayfs"], TARGET, against="overlayfs"
    )
    note = f"{image.size / 1e6:.0f} MB gzip, {image.plain_size / 1e6:.0f} MB plain; no limit."
    return Result([figure], dict(values), [note])


CASE = Case(
    "first",
    "a first pull without an index, on a fast link, against ctr pull and overlayfs",
    run,
    "twice as fast (at most 0.5)",
)
