"""One trial of a start: pull, container, bytes; and the table that sets trials side by side.

A trial is cold: nothing of the image is in containerd, and the page cache is empty. Times of one
table come from one run on one machine, alternating, as medians; never compare two tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from bench.bed.bed import Bed, drop_page_cache
from bench.bed.containerd import Containerd
from bench.bed.ember import Ember
from bench.bed.image import Image
from bench.progress import Progress

WAYS = ("overlayfs", "Ember, first pull", "Ember, index cold", "Ember, all local")


@dataclass(frozen=True)
class Trial:
    """``ready_s`` counts from the start of the pull; ``fetched_bytes`` until ready.

    ``again_s``: a second start from an empty page cache, nothing pulled; 0 where not measured.
    """

    pull_s: float
    ready_s: float
    fetched_bytes: int
    again_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """Medians of the trials of one way to start an image."""

    name: str
    trials: tuple[Trial, ...]

    def all(self, what: str) -> list[float]:
        """One figure of every trial, by its name in Trial."""
        return [float(getattr(trial, what)) for trial in self.trials]

    @property
    def pull_s(self) -> float:
        return statistics.median(trial.pull_s for trial in self.trials)

    @property
    def ready_s(self) -> float:
        return statistics.median(trial.ready_s for trial in self.trials)

    @property
    def fetched_bytes(self) -> float:
        return statistics.median(trial.fetched_bytes for trial in self.trials)

    @property
    def again_s(self) -> float:
        return statistics.median(trial.again_s for trial in self.trials)

    def document(self, base: Row, image: Image) -> dict[str, object]:
        return {
            "name": self.name,
            "pull_s": round(self.pull_s, 3),
            "ready_s": round(self.ready_s, 3),
            "ready_of_base": round(self.ready_s / base.ready_s, 3),
            "fetched_bytes": int(self.fetched_bytes),
            "share_of_image": round(self.fetched_bytes / image.size, 4),
            "trials": [asdict(trial) for trial in self.trials],
        }


class Starter:
    """Starts one image in one bed, in each of the ways that are compared."""

    def __init__(self, bed: Bed, containerd: Containerd, ember: Ember | None, image: Image) -> None:
        self.bed = bed
        self.containerd = containerd
        self.ember = ember
        self.image = image

    def overlayfs(self) -> Trial:
        """containerd's own way: fetch all, unpack all, start."""
        trial = self._trial("overlayfs")
        again = self._trial("overlayfs", pulls=False)
        self.containerd.remove_image(self.image.reference)
        return replace(trial, again_s=again.ready_s)

    def overlayfs_once(self) -> Trial:
        """containerd's own way, without a second start."""
        trial = self._trial("overlayfs")
        self.containerd.remove_image(self.image.reference)
        return trial

    def first_pull(self) -> Trial:
        """Ember without an index: the layers are streamed once, and indexed on the way."""
        return self._trial("ember")

    def index_cold(self) -> Trial:
        """Ember with the index here and none of the image's bytes."""
        self.containerd.remove_image(self.image.reference)
        self.daemon().drop_data(self.image.reference)
        return self._trial("ember")

    def all_local(self) -> Trial:
        """A start when every byte is here (page cache empty); nothing is pulled."""
        self.daemon().complete()
        return self._trial("ember", pulls=False)

    def start_again(self, snapshotter: str) -> Trial:
        """A start from an empty page cache of an image that is pulled already."""
        return self._trial(snapshotter, pulls=False)

    def forget(self) -> None:
        """Back to a machine that has never seen the image."""
        self.containerd.remove_image(self.image.reference)
        self.daemon().remove(self.image.reference)

    def daemon(self) -> Ember:
        """The bed's Ember; ValueError where it has none."""
        if self.ember is None:
            raise ValueError("this bed has no Ember")
        return self.ember

    def _trial(self, snapshotter: str, *, pulls: bool = True) -> Trial:
        reference = self.image.reference
        drop_page_cache()
        before = self.bed.registry.sent_bytes()
        pull_s = 0.0
        if pulls and snapshotter == "ember":
            pull_s = self.daemon().pull(reference)
        elif pulls:
            pull_s = self.containerd.pull(reference, snapshotter)
        sent: list[int] = []
        started = self.containerd.start_container(
            reference,
            snapshotter=snapshotter,
            when_ready=lambda: sent.append(self.bed.registry.sent_bytes()),
        )
        return Trial(pull_s, pull_s + started.ready_s, sent[0] - before)


def measure(
    starter: Starter,
    rounds: int,
    say: Progress,
    more: Mapping[str, Callable[[], Trial]] | None = None,
) -> list[Row]:
    """All ways, ``rounds`` times in turn; a way that needs another's result comes after it.

    ``more`` ways begin on a node that has never seen the image, and leave it so.
    """
    ways: list[Callable[[], Trial]] = [starter.overlayfs]
    if starter.ember is not None:
        ways += [starter.first_pull, starter.index_cold, starter.all_local]
    known = dict(zip(WAYS, ways, strict=False))
    trials: dict[str, list[Trial]] = {name: [] for name in [*known, *(more or {})]}

    def one(name: str, way: Callable[[], Trial], turn: str) -> None:
        with say.step(f"{name}{turn}", starter.bed.registry.sent_bytes):
            trial = way()
        fetched = f"{trial.fetched_bytes / 1e6:.1f} MB fetched"
        say(f"{name}: ready after {trial.ready_s:.2f} s, {fetched}")
        trials[name].append(trial)

    for number in range(rounds):
        turn = f" (round {number + 1} of {rounds})" if rounds > 1 else ""
        for name, way in known.items():
            one(name, way, turn)
        if starter.ember is not None:
            starter.forget()
        for name, way in (more or {}).items():
            one(name, way, turn)
    return [Row(name, tuple(done)) for name, done in trials.items()]


def table(rows: Sequence[Row], image: Image) -> list[list[str]]:
    """Cells of the table, a heading first; the first row is what the others are compared with."""
    heading = ["", "pull s", "ready s", f"of {rows[0].name}", "MB fetched", "share of image"]
    cells = [heading]
    for row in rows:
        share = 100 * row.fetched_bytes / image.size
        cells.append(
            [
                row.name,
                f"{row.pull_s:.2f}" if row.pull_s else "–",
                f"{row.ready_s:.2f}",
                f"{row.ready_s / rows[0].ready_s:.2f}",
                f"{row.fetched_bytes / 1e6:.1f}",
                f"{share:.1f} %",
            ]
        )
    return cells
