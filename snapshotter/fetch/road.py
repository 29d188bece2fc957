"""Road.ensure(): returns when the bytes that were asked for are here, verified; or says why not.

Life: made by the composition root over store, sources and tiers; used by whoever needs bytes;
closed before the store. It does not know who asks or what a chunk is for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from snapshotter.chunks.store import ViewStore
from snapshotter.chunks.view import View
from snapshotter.clock import Clock, SystemClock
from snapshotter.content import Digest, Extent
from snapshotter.errors import DeadlineError, EmberError, NotFoundError, UnavailableError
from snapshotter.fetch.board import Waiter
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.fill import Fill, Speed
from snapshotter.fetch.lane import Lane
from snapshotter.fetch.limits import RoadLimits
from snapshotter.fetch.link import Link
from snapshotter.fetch.pace import Origins
from snapshotter.fetch.slots import Slots
from snapshotter.fetch.sources import Sources
from snapshotter.fetch.tally import Ledger, Tally
from snapshotter.fetch.windows import Windows
from snapshotter.image.decode import DecoderPool
from snapshotter.metrics import Metrics
from snapshotter.tiers.guarded import guarded
from snapshotter.tiers.ranking import Ranking
from snapshotter.tiers.tier import Tier

log = logging.getLogger(__name__)

_LEDGERS = 8192


class Road:
    """The one road of a node. Event loop only."""

    def __init__(
        self,
        store: ViewStore,
        sources: Sources,
        tiers: Sequence[Tier],
        *,
        limits: RoadLimits | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.limits = limits or RoadLimits()
        self._store = store
        self._sources = sources
        self._clock = clock or SystemClock()
        self._metrics = metrics or Metrics()
        self._pools = (
            ThreadPoolExecutor(self.limits.workers, "ember-demand"),
            ThreadPoolExecutor(self.limits.workers, "ember-background"),
        )
        ranking = Ranking(
            [guarded(tier, stall_s=self.limits.stall_s) for tier in tiers], self._clock
        )
        origins = Origins(self._clock, most=self.limits.background_slots)
        self._crew = Crew(
            sources=sources,
            ranking=ranking,
            slots=Slots(
                self.limits.demand_slots,
                self.limits.background_slots,
                self.limits.most_of_one,
                origins.allowed,
                clock=self._clock,
            ),
            origins=origins,
            link=Link(self._clock),
            decoders=DecoderPool(),
            windows=Windows(ranking.order, self._pools[0], self._clock),
            demand_pool=self._pools[0],
            background_pool=self._pools[1],
            clock=self._clock,
            limits=self.limits,
            chance=chance or random.Random(),
        )
        slots, jobs = self._crew.slots, self._metrics.jobs
        origins.grown = slots.look_again
        jobs.labels("running").set_function(lambda: slots.running)
        jobs.labels("queued").set_function(lambda: slots.queued)
        self._lanes: dict[Digest, Lane] = {}
        self._ledgers: dict[Digest, Ledger] = {}
        self._closed = False

    @property
    def origins(self) -> Origins:
        """How many connections the origins are worth; what else fetches from there counts too."""
        return self._crew.origins

    async def ensure(
        self,
        view_id: Digest,
        extent: Extent,
        *,
        demand: bool,
        deadline_s: float | None = None,
        apart: bool = False,
    ) -> None:
        """Return when every byte of ``extent`` that lies in the view can be read, verified.

        ``demand``: somebody waits. ``apart``: neighbours that are asked for at the same time are
        fetched beside it, not with it. ``deadline_s``: for how many seconds it is tried (None: the
        miss timeout). Raises DeadlineError that says for each tier why not, NoSpaceError when
        nothing more can give way, NotFoundError for a view of which no layer is known. Cancelling
        is safe: work that others need goes on, other work ends.
        """
        lane = await self._lane(view_id)
        missing = lane.view.missing(extent)
        lane.ledger.asked(demand=demand, missing=len(missing))
        if not missing:
            return
        started_s = self._clock.monotonic_s()
        waiter = lane.want(missing, demand=demand, apart=apart)
        try:
            await self._wait(lane, waiter, self.limits.miss_timeout_s, deadline_s)
        except EmberError:
            lane.ledger.gave_up(demand=demand)
            raise
        finally:
            lane.leave(waiter)
        lane.ledger.waited(self._clock.monotonic_s() - started_s, demand=demand)

    async def complete(
        self, view_id: Digest, bytes_per_s: int | None = None, *, at_once: int = 1
    ) -> None:
        """Bring all that is missing of a view, behind everything else; resumable at any point.

        What is in doubt is read back from the disk, and fetched again where it is not right. At
        most ``bytes_per_s`` plain bytes a second (None: as fast as it goes), and ``at_once`` ranges
        side by side. Raises as ensure() for the first part that cannot be had; cancel it to stop.
        A view that is closed meanwhile is let go of.
        """
        view = (await self._lane(view_id)).view
        index = next((source.index for source in self._sources.of_view(view_id)), None)
        fill = Fill(
            view,
            index,
            Speed(self.limits.window_bytes, at_once, bytes_per_s),
            self._clock,
            partial(self.ensure, view_id, demand=False, apart=True),
            lambda: self._store.get(view_id) is view,
            lambda: view_id not in self._lanes,
        )
        await fill.run()

    @property
    def request_bytes(self) -> int:
        """Stored bytes that come in the time that a request takes to begin; 0: not known yet."""
        return self._crew.link.request_bytes

    def is_working(self, view_id: Digest) -> bool:
        """Whether something of the view is being fetched."""
        lane = self._lanes.get(view_id)
        return lane is not None and bool(lane.tasks)

    def tally(self, view_id: Digest) -> Tally:
        """What was fetched for a view since it was first asked for; zeros if it never was."""
        ledger = self._ledgers.get(view_id)
        return ledger.tally if ledger is not None else Tally()

    def forget_tally(self, view_id: Digest) -> None:
        """What was fetched is gone for good; if it comes again, counting starts anew."""
        self._ledgers.pop(view_id, None)

    def _ledger(self, view_id: Digest) -> Ledger:
        """The view's; it outlives the work for the view, of which there is some now and then."""
        ledger = self._ledgers.get(view_id)
        if ledger is None:
            while len(self._ledgers) >= _LEDGERS:
                self._ledgers.pop(next(iter(self._ledgers)))
            ledger = self._ledgers[view_id] = Ledger(self._metrics)
        return ledger

    async def stop(self, view_id: Digest) -> None:
        """End all work for a view; comes before the store releases or drops it."""
        lane = self._lanes.pop(view_id, None)
        if lane is not None:
            await self._end(lane)
        # A decoder that is kept to be continued would keep its index open, deleted or not.
        for source in self._sources.of_view(view_id):
            self._crew.decoders.discard(source.index.layer)

    async def close(self) -> None:
        """End all work. Who waits gets UnavailableError."""
        self._closed = True
        for view_id in list(self._lanes):
            await self.stop(view_id)
        for pool in self._pools:
            await asyncio.to_thread(pool.shutdown)

    async def _end(self, lane: Lane) -> None:
        lane.stop(UnavailableError(f"fetching {lane.view.digest} was stopped"))
        await asyncio.gather(*lane.tasks, return_exceptions=True)

    async def _lane(self, view_id: Digest) -> Lane:
        view = await self._view(view_id)
        if self._closed:
            raise UnavailableError("the daemon is stopping; ask again when it is back")
        lane = self._lanes.get(view_id)
        if lane is None or lane.view is not view:
            if lane is not None:  # released and opened again meanwhile: the old one can only fail
                lane.stop(UnavailableError(f"{view_id} was closed"))
            lane = self._lanes[view_id] = Lane(self._crew, view, self._ledger(view_id))
        return lane

    async def _view(self, view_id: Digest) -> View:
        view = self._store.get(view_id)
        if view is not None:
            return view
        for source in self._sources.of_view(view_id):
            index = source.index
            return await self._store.open(view_id, index.view_bytes, index.chunk_digest)
        raise NotFoundError(f"no layer is known that unpacks to {view_id}")

    async def _wait(
        self, lane: Lane, waiter: Waiter, timeout_s: float, deadline_s: float | None
    ) -> None:
        allowed_s = timeout_s if deadline_s is None else deadline_s

        def expire() -> None:
            what = f"{len(waiter.left)} chunks of {lane.view.digest}"
            why = lane.reasons(waiter)
            waiter.fail(DeadlineError(f"{what} could not be had in {allowed_s:g} s: {why}"))

        deadline = self._clock.call_later(allowed_s, expire)
        try:
            await waiter.served()
        finally:
            deadline.cancel()
