"""Time to ready on a slow link, cold: overlayfs, and Ember with what it may know of an image.

The image is ordinary (gzip, digest untouched) and its program touches about a tenth of it. All
ways are measured in turn in every round; what is compared are medians of one run. The index that is
found by referrer is pushed beside a second name of the image, so that a first pull finds none.
"""

from __future__ import annotations

from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings
from bench.progress import Progress
from bench.referrer import TRUSTED, Shared
from bench.scene import scene
from bench.trial import Row, measure

COLD_TARGET = 0.15
FIRST_TARGET = 1.0
LOCAL_TARGET = 1.05
REFERRER = "Ember, index by referrer"
# Without an index each byte of the image is sent; with one, not half of them.
FOUND_SHARE = 0.5


def figures(rows: list[Row]) -> list[Figure]:
    base, first, cold, local, *more = rows

    def against(title: str, row: Row, target: float) -> Figure:
        return Figure.of(
            title, "s", row.all("ready_s"), base.all("ready_s"), target, against="overlayfs"
        )

    found = [against("first pull: ready", first, FIRST_TARGET)]
    for title, row in (("index here", cold), *(("index by referrer", row) for row in more)):
        found.append(against(f"{title}: ready", row, COLD_TARGET))
        found.append(
            Figure.of(
                f"{title}: pull", "s", row.all("pull_s"), base.all("pull_s"), against="overlayfs"
            )
        )
        found.append(
            Figure.of(
                f"{title}: fetched",
                "MB",
                [value / 1e6 for value in row.all("fetched_bytes")],
                [value / 1e6 for value in base.all("fetched_bytes")],
                against="overlayfs",
            )
        )
    again = base.all("again_s")
    local_s = local.all("ready_s")
    against_local = "overlayfs, all local"
    found.append(
        Figure.of("all local: ready", "s", local_s, again, LOCAL_TARGET, against=against_local)
    )
    return found


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    shape = Shape(settings.rate_mbit, settings.delay_ms)
    with scene(settings, image, shape, TRUSTED) as starter:
        shared = Shared(starter)
        with say.step("building the index and pushing it beside the image"):
            shared.push()
        rows = measure(starter, settings.rounds, say, {REFERRER: shared.cold})
    notes = [
        f"{image.size / 1e6:.0f} MB gzip, {image.plain_size / 1e6:.0f} MB plain; {shape}; "
        f"containerd {settings.containerd}.x; medians of {settings.rounds}.",
        "A start with its startup set prewarmed comes with startup manifests; all local stands "
        "for the best that it can be.",
    ]
    if rows[-1].fetched_bytes > FOUND_SHARE * image.size:
        notes.append("The index was not found by referrer: that row is a first pull.")
    raw = {row.name: row.document(rows[0], image) for row in rows}
    return Result(figures(rows), raw, notes)


CASE = Case(
    "start",
    "time to ready on a slow link, cold, against overlayfs",
    run,
    "at most 0.15 of overlayfs with an index, never above 1; all local at most 1.05",
)
