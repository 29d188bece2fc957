"""One fetch of neighbouring chunks of a view, tried over all tiers and sources until they are here.

A job ends when nobody waits for what it has not brought yet; it never gives up by itself, since
each waiter has its own deadline. Between rounds it backs off, and holds no slot. A *lasting* job
brings the whole view, whoever still waits: for sources that can only be read from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from snapshotter.chunks.datafile import DiskError
from snapshotter.chunks.view import View
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import (
    BusyError,
    CorruptError,
    EmberError,
    FailedPreconditionError,
    NoSpaceError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
)
from snapshotter.fetch.board import Board
from snapshotter.fetch.crew import Crew
from snapshotter.fetch.pace import origin_of
from snapshotter.fetch.slots import Ticket
from snapshotter.fetch.sources import LayerSource
from snapshotter.fetch.tally import Ledger
from snapshotter.fetch.transfer import Transfer
from snapshotter.tiers.tier import Tier

log = logging.getLogger(__name__)

_MOST_REASONS = 8
_BUSY_S = 1.0
"""How long a tier rests that asked for it and did not say for how long."""


class Job:
    """See above. ``hand_over`` starts (or joins) the lasting job when ranges cannot be had."""

    def __init__(
        self,
        crew: Crew,
        view: View,
        board: Board,
        ledger: Ledger,
        *,
        demand: bool,
        lasting: bool,
        hand_over: Callable[[Job], None],
        ended: Callable[[Job], None],
    ) -> None:
        self.wanted: set[int] = set()
        self.lasting = lasting
        self.tail_chunk = -1
        self.tail_end = 0
        """The last chunk that is on the way, and the compressed offset by which it comes."""
        self.reasons: dict[str, str] = {}
        """By tier: why it has not brought it yet."""
        self._crew = crew
        self._view = view
        self._board = board
        self._ledger = ledger
        self._hand_over = hand_over
        self._ended = ended
        origin = "" if demand else _origin(crew, view)
        self._ticket = Ticket(view.digest, demand=demand, origin=origin)
        self._transfer = Transfer(crew, view, ledger, self._ticket, board.arrived, board.is_wanted)
        self._task: asyncio.Task[None] | None = None

    @property
    def demand(self) -> bool:
        """Whether somebody waits for it."""
        return self._ticket.demand

    @property
    def in_offset(self) -> int:
        """Compressed offset up to which it has come."""
        return self._transfer.in_offset

    def start(self, in_offset: int) -> asyncio.Task[None]:
        """Begin; ``in_offset`` is where the first fetch will."""
        self._transfer.in_offset = in_offset
        self._task = asyncio.create_task(self._run(), name=f"fetch {self._view.digest.hex[:12]}")
        return self._task

    def promote(self) -> None:
        """Somebody waits for it now."""
        self._crew.slots.promote(self._ticket)

    def take(self, chunks: Iterable[int], tail_end: int, *, steal: bool = False) -> None:
        """Bring these too."""
        chunks = list(chunks)
        self.wanted.update(chunks)
        self._board.assign(self, chunks, steal=steal)
        self.tail_chunk = max(self.tail_chunk, *chunks)
        self.tail_end = max(self.tail_end, tail_end)

    def left(self) -> list[int]:
        """The chunks that it still has to bring, rising."""
        view, board = self._view, self._board
        if self.lasting:
            return view.missing(Extent(0, view.length_bytes))
        mine = [
            number
            for number in self.wanted
            if board.carriers.get(number) is self and board.is_wanted(number)
        ]
        for number in mine:
            if view.is_readable(number):
                board.arrived(number)
        return sorted(number for number in mine if not view.is_readable(number))

    def cancel(self) -> None:
        """Nobody wants it any more: from now on it carries nothing."""
        self._board.dismiss(self)
        self._ended(self)  # a task that never ran has no end of its own
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self) -> None:
        rounds = 0
        try:
            while self.left():
                async with self._crew.slots.hold(self._ticket):
                    before = self.left()
                    wait_s = await self._round_with_room()
                after = set(self.left())
                if self.lasting and after and not self._board.waited_for:
                    return  # the next one who asks starts it again
                progress = not after.issuperset(before)
                rounds = 0 if progress else rounds + 1
                if after and not (progress and wait_s is None):
                    await self._crew.clock.sleep(max(wait_s or 0, self._backoff_s(rounds)))
        except (NoSpaceError, FailedPreconditionError, NotFoundError) as error:
            self._fail(error)
        except Exception:
            log.exception("a fetch of %s broke", self._view.digest)
            self._fail(UnavailableError(f"a fetch of {self._view.digest} broke; see the log"))
        finally:
            self._task = None  # it ends with an error, perhaps, whose frames know this job
            self._board.dismiss(self)
            self._ended(self)

    async def _round_with_room(self) -> float | None:
        """A round; again if background work found no room and somebody waits for it by now.

        Background work leaves the last of the room alone, readers may have it.
        """
        in_background = not self.demand
        try:
            return await self._round()
        except NoSpaceError:
            if in_background and self.demand:
                return await self._round()
            raise

    async def _round(self) -> float | None:
        """Ask every tier for every source, best first, until one has brought what is left.

        None: one did. Else for how many seconds all of them want to be left in peace (0: not).
        """
        sources = self._crew.sources.of_view(self._view.digest)
        if not sources:
            why = "no layer is known that unpacks to this view"
            if not (self.demand or self.lasting):  # its image was removed: nobody reads it
                raise NotFoundError(f"{self._view.digest}: {why}")
            self._note("sources", why)
        rests: list[float] = []
        for tier in self._crew.ranking.order():
            for source in sources:
                for blob in source.blobs:
                    rest_s = await self._try(tier, source, blob)
                    if rest_s is None or not self.left():
                        return None
                    rests.append(rest_s)
        return min(rests, default=0.0)

    async def _try(self, tier: Tier, source: LayerSource, blob: BlobRef) -> float | None:
        """None if the tier did what it was asked for; else why not is noted, and for how many
        seconds it wants to be left in peace is returned."""
        ranking = self._crew.ranking
        try:
            await self._ask(tier, source, blob)
        except (NoSpaceError, FailedPreconditionError):
            raise
        except DiskError as error:
            self._note("cache", str(error))
        except BusyError as error:
            self._failed(tier, "busy", error)
            return _BUSY_S if error.retry_after_s is None else error.retry_after_s
        except NotFoundError as error:
            self._failed(tier, "miss", error)
            self._crew.sources.look_further(self._view.digest)
        except CorruptError as error:
            tier.suspect(blob)
            ranking.failed(tier)
            self._failed(tier, "corrupt", error)
        except EmberError as error:
            ranking.failed(tier)
            self._failed(tier, "failure", error)
        else:
            ranking.worked(tier)
            return None
        return 0.0

    async def _ask(self, tier: Tier, source: LayerSource, blob: BlobRef) -> None:
        if not source.index.random_access and not self.lasting:
            self._hand_over(self)  # a second source, of another packing than the first
            return
        try:
            if self.demand or self.lasting:
                await self._transfer.ranges(tier, source, blob, self.left())
            else:
                connections = self._crew.origins.of(origin_of(blob.repository))
                with connections.running():
                    await self._transfer.ranges(
                        tier, source, blob, self.left(), connections.received
                    )
        except RangeUnsupportedError as error:
            self._note(tier.name, str(error))
            if not self.lasting:
                self._hand_over(self)
                return
            await self._transfer.whole(tier, source, blob)

    def _failed(self, tier: Tier, outcome: str, error: EmberError) -> None:
        self._note(tier.name, str(error))
        self._ledger.failed(tier.name, outcome, str(error))

    def _note(self, who: str, why: str) -> None:
        if who in self.reasons or len(self.reasons) < _MOST_REASONS:
            self.reasons[who] = why

    def _fail(self, error: EmberError) -> None:
        for number in self._board.waited_for:
            if self._board.carriers.get(number) is self:
                self._board.fail(number, error)

    def _backoff_s(self, rounds: int) -> float:
        limits = self._crew.limits
        most_s = min(limits.backoff_most_s, limits.backoff_first_s * 2.0 ** min(rounds, 16))
        return most_s * self._crew.chance.uniform(0.5, 1.0)


def _origin(crew: Crew, view: View) -> str:
    """Where the view will be fetched from, most likely."""
    for source in crew.sources.of_view(view.digest):
        for blob in source.blobs:
            return origin_of(blob.repository)
    return ""
