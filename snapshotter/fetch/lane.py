"""The road of one view: turns what is asked for in one turn of the loop into few jobs.

A chunk that a job under way will bring soon is waited for; neighbours are fetched together; what
lies right behind a running fetch is appended to it, since its decoder is nearer than a checkpoint.
It plans; jobs do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from snapshotter.chunks.view import View
from snapshotter.content import Extent
from snapshotter.errors import EmberError
from snapshotter.fetch.board import Board, Waiter
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.job import Job
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.image.decode import Span, plan
from snapshotter.image.index import LayerIndex


class Lane:
    """What is under way for one view. Event loop only; nothing here waits."""

    def __init__(self, crew: Crew, view: View, ledger: Ledger) -> None:
        self.view = view
        self.ledger = ledger
        self._crew = crew
        self._board = Board()
        self._jobs: set[Job] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting: Job | None = None
        self._fresh: set[int] = set()
        self._planning: asyncio.Handle | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is not over yet, cancelled work included."""
        return list(self._tasks)

    def want(self, chunks: Iterable[int], *, demand: bool, apart: bool = False) -> Waiter:
        """Wait for ``chunks``, none of which is here; the caller leaves() in the end.

        ``apart``: they get a fetch of their own, whatever else is asked for in this turn.
        """
        waiter = self._board.wait(chunks, demand=demand)
        source = self._source()
        for number in sorted(waiter.left):
            if not self._join(number, source, demand=demand):
                self._fresh.add(number)
        if apart:
            self._plan()
        elif self._fresh and self._planning is None:
            self._planning = asyncio.get_running_loop().call_soon(self._plan)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """The waiter is served, or gave up: work that nobody else wants is cancelled."""
        if not self._board.leave(waiter):
            return
        for job in list(self._jobs):
            if not job.lasting and not job.left():
                job.cancel()

    def reasons(self, waiter: Waiter) -> str:
        """Why what the waiter waits for is not here yet, by tier."""
        carriers = {id(job): job for job in map(self._board.carriers.get, waiter.left) if job}
        found = {
            f"{who}: {why}"
            for job in carriers.values()
            if isinstance(job, Job)
            for who, why in job.reasons.items()
        }
        return "; ".join(sorted(found)) or "nothing answered"

    def stop(self, error: EmberError) -> None:
        """Cancel everything; who waits gets ``error``."""
        for number in self._board.waited_for:
            self._board.fail(number, error)
        for job in list(self._jobs):
            job.cancel()

    def _source(self) -> LayerSource | None:
        return next(iter(self._crew.sources.of_view(self.view.digest)), None)

    def _join(self, number: int, source: LayerSource | None, *, demand: bool) -> bool:
        """Wait for the job that will bring ``number`` anyway, if it will do so soon enough."""
        job = self._board.carriers.get(number)
        if not isinstance(job, Job):
            return False
        if source is not None and not job.lasting:
            index, limits = source.index, self._crew.limits
            distance = index.chunk_input_end(number) - job.in_offset
            own = plan(index, [number])[0].length_bytes
            if demand and distance > max(own * limits.join_factor, limits.join_bytes):
                return False
        job.wanted.add(number)
        self.ledger.tally.joined_chunks += 1
        if demand:
            job.promote()
        return True

    def _plan(self) -> None:
        """Make jobs of what was asked for since the last turn."""
        self._planning = None
        fresh, self._fresh = self._fresh, set()
        for number in fresh:
            if self.view.is_readable(number):
                self._board.arrived(number)
        fresh = {number for number in fresh if self._board.is_wanted(number)}
        source = self._source()
        demanded = {number for number in fresh if self._board.is_demanded(number)}
        for number in sorted(fresh - demanded):
            if number - 1 in demanded:  # it comes with what somebody waits for
                demanded.add(number)
        for demand in (True, False):
            chunks = sorted(demanded if demand else fresh - demanded)
            if chunks and source is None:
                self._start(chunks, Span(0, 0, None, chunks[0], chunks[0], chunks[-1]), demand)
            elif chunks and source is not None and not source.index.random_access:
                self._last(demand=demand)
            elif chunks and source is not None:
                self._plan_ranges(source.index, chunks, demand=demand)

    def _plan_ranges(self, index: LayerIndex, chunks: list[int], *, demand: bool) -> None:
        for span in plan(index, chunks, gap_bytes=self._crew.gap_bytes):
            wanted = [n for n in chunks if span.wanted_chunk <= n <= span.last_chunk]
            running = self._running_up_to(span)
            if running is None:
                self._start(wanted, span, demand)
                continue
            running.take(wanted, span.in_end, steal=True)
            if demand:
                running.promote()

    def _running_up_to(self, span: Span) -> Job | None:
        """A job that will soon end between the span's checkpoint and its first wanted chunk."""
        if span.checkpoint is None:
            return None
        for job in self._jobs:
            near = job.tail_end - job.in_offset <= self._crew.limits.join_bytes
            if (
                near
                and not job.lasting
                and job.tail_end >= span.in_offset
                and job.tail_chunk < span.wanted_chunk
            ):
                return job
        return None

    def _start(self, wanted: list[int], span: Span, demand: bool) -> None:
        job = self._job(demand=demand, lasting=False)
        job.take(wanted, span.in_end, steal=True)
        on_the_way = self._on_the_way(span)
        self._board.assign(job, on_the_way)
        self._watch(job.start(span.in_offset))

    def _on_the_way(self, span: Span) -> list[int]:
        """The chunks that are not here and come out before, or between, those that are wanted."""
        size = self.view.chunk_bytes
        count = span.last_chunk + 1 - span.first_chunk
        return self.view.missing(Extent(span.first_chunk * size, count * size))

    def _last(self, *, demand: bool) -> Job:
        """The lasting job, started if need be; it carries every chunk that is missing."""
        job = self._lasting
        if job is None:
            job = self._lasting = self._job(demand=demand, lasting=True)
            everything = Extent(0, self.view.length_bytes)
            job.take(self.view.missing(everything), 0, steal=True)
            self._watch(job.start(0))
        if demand:
            job.promote()
        return job

    def _hand_over(self, job: Job) -> None:
        """``job`` found that ranges cannot be had: the lasting one brings all that it carried."""
        lasting = self._last(demand=job.demand)
        lasting.reasons.update(job.reasons)
        self._board.assign(lasting, job.left(), steal=True)

    def _watch(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _job(self, *, demand: bool, lasting: bool) -> Job:
        job = Job(
            self._crew,
            self.view,
            self._board,
            self.ledger,
            demand=demand,
            lasting=lasting,
            hand_over=self._hand_over,
            ended=self._ended,
        )
        self._jobs.add(job)
        return job

    def _ended(self, job: Job) -> None:
        """A job is over: what is still waited for and carried by nobody is planned anew."""
        self._jobs.discard(job)
        if self._lasting is job:
            self._lasting = None
        orphans = [n for n in self._board.waited_for if n not in self._board.carriers]
        self._fresh.update(orphans)
        if self._fresh and self._planning is None:
            self._planning = asyncio.get_running_loop().call_soon(self._plan)
