"""Images of 10 to 100,000 small files: first pull, then finding and reading all of them, cold.

Each against containerd's overlayfs, in the same bed and in turn.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.bed.bed import Bed, drop_page_cache
from bench.bed.grown import many_files
from bench.bed.link import Shape
from bench.growth import Growth
from bench.measure import Case, Result, Settings, alternate
from bench.mounted import mounted, timed_command
from bench.progress import Progress
from bench.scene import snapshotters
from bench.trial import Starter

USUAL, QUICK = (10, 100, 1000, 10_000, 100_000), (10, 1000)
READ_TARGET, PULL_TARGET = 1 / 0.97, 1.0


def pull(starter: Starter, way: str) -> float:
    """From the start of the pull to ready, and back to where it began."""
    if way == "ember":
        seconds = starter.first_pull().ready_s
        starter.forget()
        return seconds
    return starter.overlayfs_once().ready_s


def find(root: Path) -> float:
    drop_page_cache()
    return timed_command(["find", root, "-xdev", "-printf", "%s %m %U\n"])


def read_all(root: Path) -> float:
    """A tar of everything: to /dev/null itself it would read nothing."""
    drop_page_cache()
    return timed_command(["sh", "-c", 'tar -C "$0" -cf - . | cat > /dev/null', root])


@contextlib.contextmanager
def both_mounted(starter: Starter) -> Iterator[dict[str, Path]]:
    containerd, reference = starter.containerd, starter.image.reference
    containerd.pull(reference)
    starter.first_pull()
    starter.all_local()
    with (
        mounted(containerd, reference, "overlayfs") as theirs,
        mounted(containerd, reference, "ember") as ours,
    ):
        yield {"ember": ours, "overlayfs": theirs}


def growths() -> dict[str, Growth]:
    made = {}
    for key, title, target in (
        ("pull", "First pull of so many small files: seconds until ready", PULL_TARGET),
        ("find", "Finding so many small files, cold: seconds", READ_TARGET),
        ("read", "Reading so many small files, cold: seconds", READ_TARGET),
    ):
        way = f"ember, {key}"
        made[key] = Growth(
            f"scale-files-{key}", title, "files", "s", "s", "overlayfs", {way: (target, 0.0)}
        )
    return made


def named(key: str, values: dict[str, list[float]]) -> dict[str, list[float]]:
    return {f"ember, {key}": values["ember"], "overlayfs": values["overlayfs"]}


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    made = growths()
    with Bed(Shape(0), keeps=False) as bed:
        containerd, ember = snapshotters(bed, settings)
        for count in map(int, settings.steps(USUAL, QUICK)):
            with (
                tempfile.TemporaryDirectory(dir=bed.directory) as folder,
                say.step(f"an image of {count:,} files"),
            ):
                image = many_files(Path(folder), count)
                image.push(bed.registry)
            starter = Starter(bed, containerd, ember, image)
            pulls = {way: partial(pull, starter, way) for way in ("ember", "overlayfs")}
            made["pull"].add(count, named("pull", alternate(pulls, settings.rounds, say)))
            with both_mounted(starter) as roots:
                works: tuple[tuple[str, Callable[[Path], float]], ...]
                works = (("find", find), ("read", read_all))
                for key, work in works:
                    ways = {way: partial(work, root) for way, root in roots.items()}
                    made[key].add(count, named(key, alternate(ways, settings.rounds, say)))
            starter.forget()
    for growth in made.values():
        growth.into(result)
    return result


CASE = Case(
    "scale-files",
    "images of 10 to 100,000 small files against overlayfs: first pull, find, read",
    run,
    "reads at least 0.97 of overlayfs's rate; a first pull never slower",
)
