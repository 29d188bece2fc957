"""From one container to a hundred of one image, all alive at once: seconds until the last is ready.

All bytes are here and the page cache is empty; both ways start the same program through the same
containerd, so that what differs is what is under the container.
"""

from __future__ import annotations

from functools import partial

from bench.bed.bed import drop_page_cache
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.crowd import Crowd
from bench.growth import Growth
from bench.measure import Case, Result, Settings, alternate
from bench.progress import Progress
from bench.scene import scene
from bench.trial import Starter

USUAL, QUICK = (1, 10, 100), (1, 4)
TARGET = 1.05


def crowd(starter: Starter, snapshotter: str, count: int) -> float:
    drop_page_cache()
    with Crowd(starter.containerd, starter.image.reference, snapshotter) as containers:
        return containers.start(count)


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    growth = Growth(
        "scale-containers",
        "Containers of one image, all local: seconds until all are ready",
        "containers",
        "s",
        "s",
        "overlayfs",
        {"ember": (TARGET, 0.0)},
    )
    with scene(settings, image, Shape(0)) as starter:
        with say.step("pulling the image twice"):
            starter.containerd.pull(image.reference)
            starter.first_pull()
            starter.all_local()
        for count in map(int, settings.steps(USUAL, QUICK)):
            say(f"{count} containers")
            ways = {name: partial(crowd, starter, name, count) for name in ("ember", "overlayfs")}
            growth.add(count, alternate(ways, settings.rounds, say))
    growth.into(result)
    return result


CASE = Case(
    "scale-containers",
    "1, 10, 100 containers of one image against overlayfs, everything local",
    run,
    "at most 1.05 of overlayfs",
)
