"""The same image over the same link through Ember and through other lazy snapshotters.

All in one bed, in turn, none having seen the image; the others get it in the form that they need,
Ember as it is, with an index that it finds by referrer. Processor time is the daemon's and
containerd's, from before the pull until ready.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.bed.bed import Bed, drop_page_cache
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.consumption import family, peak_bytes, processor_s, reset_peak
from bench.measure import Case, Figure, Result, Settings
from bench.mounted import mounted
from bench.peers.nydus import Nydus
from bench.peers.peer import Peer
from bench.peers.soci import Soci
from bench.peers.stargz import Stargz
from bench.progress import Progress
from bench.referrer import TRUSTED, Shared
from bench.touched import touched
from bench.trial import Starter

PEERS: tuple[type[Peer], ...] = (Soci, Stargz, Nydus)
AHEAD = 1.0
# Who fetched more of the image than this was not lazy.
LAZY = 0.9
MB = 1e6


@dataclass(frozen=True)
class Cost:
    """One cold start: seconds, bytes and what the daemons took for it, until ready."""

    pull_s: float
    ready_s: float
    sent_bytes: int
    processor_s: float
    peak_bytes: int


class Contest:
    """One bed in which every way is tried in turn."""

    def __init__(
        self, starter: Starter, shared: Shared, peers: list[Peer], references: dict[str, str]
    ) -> None:
        self.starter = starter
        self.shared = shared
        self.containerd = starter.containerd
        self.peers = peers
        self.references = references

    def ways(self) -> dict[str, Callable[[], Cost]]:
        found: dict[str, Callable[[], Cost]] = {"ember": self.ember, "overlayfs": self.overlayfs}
        for peer in self.peers:
            found[peer.name] = self._way(peer)
        return found

    def overlayfs(self) -> Cost:
        reference = self.starter.image.reference
        cost = self._cost("overlayfs", reference, self.containerd.pull, None)
        self.containerd.remove_image(reference)
        return cost

    def ember(self) -> Cost:
        """In a daemon that has just started: its peak is of this start alone."""
        ember = self.starter.daemon()
        ember.stop()
        ember.start()
        cost = self._cost(
            "ember", self.shared.reference, lambda reference, _: ember.pull(reference), ember.pid
        )
        self.shared.forget()
        return cost

    def _way(self, peer: Peer) -> Callable[[], Cost]:
        def run() -> Cost:
            reference = self.references[peer.name]
            peer.start(self.containerd)
            try:
                cost = self._cost(peer.name, reference, self.containerd.pull, peer.pid)
                self.containerd.remove_image(reference)
            finally:
                peer.stop()
            if not self.containerd.holds_nothing():  # what the peer holds there is no cold start
                self.containerd.clear()
                self.containerd.start()
            return cost

        return run

    def _cost(
        self, name: str, reference: str, pull: Callable[[str, str], float], daemon: int | None
    ) -> Cost:
        registry = self.starter.bed.registry
        drop_page_cache()
        sent = registry.sent_bytes()
        own = self.containerd.pid

        def everybody() -> list[int]:
            # Of containerd only itself: shims and containers are in every way the same.
            return [own, *(family(daemon) if daemon else [])]

        reset_peak(everybody())
        before = processor_s(everybody())
        ended: list[tuple[int, float, int]] = []

        def when_ready() -> None:
            daemons = family(daemon) if daemon else [own]
            ended.append(
                (
                    registry.sent_bytes() - sent,
                    processor_s(everybody()) - before,
                    peak_bytes(daemons),
                )
            )

        pull_s = pull(reference, name)
        started = self.containerd.start_container(
            reference, snapshotter=name, when_ready=when_ready
        )
        return Cost(pull_s, pull_s + started.ready_s, *ended[0])


def figures(costs: dict[str, list[Cost]]) -> list[Figure]:
    """Ours beside each of the others, column by column."""
    columns: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
        ("pull", "s", lambda cost: cost.pull_s),
        ("ready", "s", lambda cost: cost.ready_s),
        ("sent", "MB", lambda cost: cost.sent_bytes / MB),
        ("processor", "s", lambda cost: cost.processor_s),
        ("peak memory", "MB", lambda cost: cost.peak_bytes / MB),
    )
    found = []
    for name in (name for name in costs if name != "ember"):
        for title, unit, value in columns:
            found.append(
                Figure.of(
                    f"{name}: {title}",
                    unit,
                    [value(cost) for cost in costs["ember"]],
                    [value(cost) for cost in costs[name]],
                    AHEAD if name != "overlayfs" else None,
                    against=name,
                )
            )
    return found


def prepare(bed: Bed, image: Image, starter: Starter, peers: list[Peer], say: Progress) -> Contest:
    """The index of Ember and the forms of the others; what a start touches is seen on overlayfs."""
    containerd = starter.containerd
    with say.step("pulling the image as it is, to see what a start touches"):
        containerd.pull(image.reference)
        starter.start_again("overlayfs")
        with mounted(containerd, image.reference, "overlayfs") as root:
            what = touched(root, image)
    references = {}
    for peer in peers:
        with say.step(f"the image as {peer.name} needs it (kept for the next time)"):
            references[peer.name] = peer.converted(containerd, image, what)
    containerd.clear()  # some forms hold the layers that they were made of
    containerd.start()
    starter.daemon().start()
    shared = Shared(starter)
    with say.step("building Ember's index and pushing it beside the image"):
        shared.push()
    return Contest(starter, shared, peers, references)


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    for kind in PEERS:
        if missing := kind.missing():
            result.notes.append(f"{kind.name}: not here ({', '.join(missing)} not on the path).")
    with Bed(Shape(settings.rate_mbit, settings.delay_ms)) as bed:
        image.push(bed.registry)
        peers = [kind(bed) for kind in PEERS if not kind.missing()]
        ember = bed.ember(2)
        ember.configure(completion=False, sections=TRUSTED)
        containerd = bed.containerd(
            2,
            ember_socket=ember.socket,
            ember_root=ember.root,
            proxies={peer.name: (peer.socket, peer.root) for peer in peers},
        )
        try:
            contest = prepare(bed, image, Starter(bed, containerd, ember, image), peers, say)
            costs: dict[str, list[Cost]] = {name: [] for name in contest.ways()}
            for number in range(settings.rounds):
                ways = list(contest.ways().items())
                for name, way in ways if number % 2 == 0 else ways[::-1]:
                    with say.step(f"{name}, round {number + 1} of {settings.rounds}"):
                        costs[name].append(way())
        finally:
            for peer in peers:
                peer.stop()
    result.figures = figures(costs)
    for name, found in costs.items():
        if name != "overlayfs" and min(cost.sent_bytes for cost in found) > LAZY * image.size:
            result.notes.append(f"{name} was not lazy: it fetched the whole image.")
    result.raw = {name: [vars(cost) for cost in found] for name, found in costs.items()}
    return result


CASE = Case(
    "peers",
    "a cold start through Ember and through other lazy snapshotters",
    run,
    "ahead of each in each column (at most 1)",
)
