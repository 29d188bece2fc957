"""Time to ready on a slow link, cold: overlayfs, Ember's first pull, and Ember with its index.

The image is ordinary (gzip, digest untouched) and its program touches about a tenth of it. All
ways are measured in turn in every round; what is compared are medians of one run.
"""

from __future__ import annotations

from bench.bed.bed import Bed
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings
from bench.progress import Progress
from bench.trial import Row, Starter, measure

COLD_TARGET = 0.15
FIRST_TARGET = 1.0
LOCAL_TARGET = 1.05


def figures(rows: list[Row]) -> list[Figure]:
    base, first, cold, local = rows
    against = "overlayfs"
    return [
        Figure(
            "first pull: ready", "s", first.ready_s, base.ready_s, FIRST_TARGET, against=against
        ),
        Figure("index cold: ready", "s", cold.ready_s, base.ready_s, COLD_TARGET, against=against),
        Figure("index cold: pull", "s", cold.pull_s, base.pull_s, against=against),
        Figure(
            "index cold: fetched",
            "MB",
            cold.fetched_bytes / 1e6,
            base.fetched_bytes / 1e6,
            against=against,
        ),
        Figure(
            "all local: ready",
            "s",
            local.ready_s,
            base.again_s,
            LOCAL_TARGET,
            against="overlayfs, all local",
        ),
    ]


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    shape = Shape(settings.rate_mbit, settings.delay_ms)
    with Bed(shape) as bed:
        image.push(bed.registry)
        ember = bed.ember(settings.containerd)
        containerd = bed.containerd(
            settings.containerd, ember_socket=ember.socket, ember_root=ember.root
        )
        ember.start()
        rows = measure(Starter(bed, containerd, ember, image), settings.rounds, say)
    note = (
        f"{image.size / 1e6:.0f} MB gzip, {image.plain_size / 1e6:.0f} MB plain; {shape}; "
        f"containerd {settings.containerd}.x; medians of {settings.rounds}."
    )
    raw = {row.name: row.document(rows[0], image) for row in rows}
    return Result(figures(rows), raw, [note])


CASE = Case("start", "time to ready on a slow link, cold, against overlayfs", run)
