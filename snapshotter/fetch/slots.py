"""Who may fetch now: demand has slots of its own, background runs only while no demand does.

Invariants: no more fetches run than there are slots, but for those promoted in mid-run; and no
owner (a view) gets one more slot unless more are free than it has. So one whose origin hangs takes
half of them, a second one a quarter, and a newcomer finds room. What brings nothing for long is
*silent*: background runs beside such demand, and who has nothing silent gets slots lent in its
stead, up to a bound, however many origins hang. It does not know what is fetched.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar

from snapshotter.clock import Clock, Timer

QUIET_S = 2.0
"""A fetch that has brought nothing for so long is silent."""
_LOOK_S = 1.0
_LENT = 3
"""Slots are lent up to so many times their number."""

K = TypeVar("K", bound=Hashable)


class Ticket:
    """One fetch's place; ``demand`` may turn true at any time, by Slots.promote()."""

    __slots__ = ("aside", "demand", "heard_s", "origin", "owner", "running", "silent", "turn")

    def __init__(self, owner: Hashable, *, demand: bool, origin: str = "") -> None:
        self.owner = owner
        self.origin = origin
        """Where it fetches from: background fetches from one origin have a bound of their own."""
        self.demand = demand
        self.running = self.silent = False
        self.heard_s = 0.0
        """When it began, or brought something."""
        self.turn: asyncio.Future[None] | None = None
        self.aside = asyncio.Event()
        """Clear while the fetch stands aside."""


class _Set:
    """Some slots and who queues for them: owners take turns, each one's first come goes first."""

    def __init__(
        self, slots: int, most_of_one: int, most_from: Callable[[str], int] | None = None
    ) -> None:
        self._slots = slots
        self._most_of_one = most_of_one
        self._most_from = most_from
        self._running: Counter[Hashable] = Counter()
        self._origins: Counter[str] = Counter()
        self._silent: Counter[Hashable] = Counter()
        self._queues: dict[Hashable, deque[Ticket]] = {}
        self.running = self.silent = 0

    @property
    def queued(self) -> int:
        # In one step, for metrics are asked for from another thread.
        return sum(map(len, list(self._queues.values())))

    @property
    def is_busy(self) -> bool:
        """Whether something comes, or could begin to."""
        return self.running > self.silent or not self._silent.keys() >= self._queues.keys()

    def join(self, ticket: Ticket) -> None:
        self._queues.setdefault(ticket.owner, deque()).append(ticket)

    def leave(self, ticket: Ticket) -> None:
        queue = self._queues[ticket.owner]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.owner]

    def enter(self, ticket: Ticket) -> None:
        self.running += 1
        self._running[ticket.owner] += 1
        self._origins[ticket.origin] += 1

    def hush(self, ticket: Ticket) -> None:
        self.silent += 1
        self._silent[ticket.owner] += 1
        ticket.silent = True

    def heard(self, ticket: Ticket) -> None:
        self.silent -= 1
        _less(self._silent, ticket.owner)
        ticket.silent = False

    def end(self, ticket: Ticket) -> None:
        if ticket.silent:
            self.heard(ticket)
        self.running -= 1
        _less(self._running, ticket.owner)
        _less(self._origins, ticket.origin)

    def next(self) -> Ticket | None:
        """Take whose turn it is out of the queue; None while nobody there may run."""
        lent = min(self.silent, _LENT * self._slots)
        for owner, queue in self._queues.items():
            free = self._slots - self.running + (0 if owner in self._silent else lent)
            share = min(free, self._most_of_one)
            if self._running[owner] < share and self._may_run(queue[0].origin):
                ticket = queue.popleft()
                del self._queues[owner]
                if queue:  # its next one comes after everybody else's
                    self._queues[owner] = queue
                return ticket
        return None

    def _may_run(self, origin: str) -> bool:
        return self._most_from is None or self._origins[origin] < self._most_from(origin)


def _less(counts: Counter[K], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Slots:
    """Two bounded sets of slots; ``most_of_one`` bounds further what an owner has of each.

    ``most_from``: how many background fetches from an origin may run now.
    """

    def __init__(
        self,
        demand_slots: int,
        background_slots: int,
        most_of_one: int | None = None,
        most_from: Callable[[str], int] | None = None,
        *,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._look: Timer | None = None
        self._at_work: set[Ticket] = set()
        self._sets = {
            True: _Set(demand_slots, most_of_one or demand_slots),
            False: _Set(background_slots, most_of_one or background_slots, most_from),
        }
        self._aside: set[Ticket] = set()

    @property
    def running(self) -> int:
        """How many fetches run."""
        return sum(slots.running for slots in self._sets.values())

    @property
    def queued(self) -> int:
        """How many fetches wait for a slot."""
        return sum(slots.queued for slots in self._sets.values())

    @asynccontextmanager
    async def hold(self, ticket: Ticket) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the length of the block."""
        await self._acquire(ticket)
        try:
            yield
        finally:
            self._end(ticket)

    def look_again(self) -> None:
        """More may run from some origin than before."""
        self._next()

    def promote(self, ticket: Ticket) -> None:
        """Somebody waits for this fetch now: it queues, or goes on, as demand."""
        if ticket.demand:
            return
        if ticket.running:
            self._sets[False].end(ticket)
            self._begin(self._sets[True], ticket)
        elif ticket.turn is not None:
            self._sets[False].leave(ticket)
            self._sets[True].join(ticket)
        ticket.demand = True
        ticket.aside.set()
        self._next()

    def heard(self, ticket: Ticket) -> None:
        """The fetch has brought something."""
        ticket.heard_s = self._clock.monotonic_s()
        if ticket.silent:
            self._sets[ticket.demand].heard(ticket)

    async def give_way(self, ticket: Ticket, most_s: float) -> None:
        """A background fetch stands aside while demand runs, but no longer than ``most_s``."""
        if ticket.demand or not self._sets[True].is_busy:
            return
        ticket.aside.clear()
        self._aside.add(ticket)
        self._watch()
        try:
            async with asyncio.timeout(most_s):
                await ticket.aside.wait()
        except TimeoutError:
            return
        finally:
            self._aside.discard(ticket)

    async def _acquire(self, ticket: Ticket) -> None:
        self._sets[ticket.demand].join(ticket)
        self._next()
        if ticket.running:
            return
        ticket.turn = asyncio.get_running_loop().create_future()
        try:
            await ticket.turn
        except asyncio.CancelledError:
            if ticket.running:
                self._end(ticket)
            else:
                self._sets[ticket.demand].leave(ticket)
                self._next()
            raise
        finally:
            ticket.turn = None

    def _begin(self, slots: _Set, ticket: Ticket) -> None:
        ticket.running = True
        ticket.heard_s = self._clock.monotonic_s()
        slots.enter(ticket)
        self._at_work.add(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.running = False
        self._at_work.discard(ticket)
        self._sets[ticket.demand].end(ticket)
        self._next()

    def _watch(self) -> None:
        """Look for silent ones while anybody waits for their slots or for their end."""
        wanted = bool(self._aside or self.queued) and any(not one.silent for one in self._at_work)
        if wanted and self._look is None:
            self._look = self._clock.call_later(_LOOK_S, self._look_for_silence)

    def _look_for_silence(self) -> None:
        self._look = None
        long_ago_s = self._clock.monotonic_s() - QUIET_S
        for ticket in self._at_work:
            if not ticket.silent and ticket.heard_s <= long_ago_s:
                self._sets[ticket.demand].hush(ticket)
        self._next()

    def _next(self) -> None:
        """Let in whoever may run now."""
        self._admit(demand=True)
        if not self._sets[True].is_busy:
            for ticket in self._aside:
                ticket.aside.set()
            self._admit(demand=False)
        self._watch()

    def _admit(self, *, demand: bool) -> None:
        slots = self._sets[demand]
        while (ticket := slots.next()) is not None:
            self._begin(slots, ticket)
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(None)
