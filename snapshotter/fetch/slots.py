"""Who may fetch now: demand has slots of its own, background runs only while no demand does.

Invariant: no more fetches run than there are slots, but for those promoted in mid-run. It does not
know what is fetched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ticket:
    """One fetch's place; ``demand`` may turn true at any time, by Slots.promote()."""

    __slots__ = ("aside", "demand", "running", "turn")

    def __init__(self, *, demand: bool) -> None:
        self.demand = demand
        self.running = False
        self.turn: asyncio.Future[None] | None = None
        self.aside = asyncio.Event()
        """Clear while the fetch stands aside."""


class Slots:
    """Two bounded sets of slots, first come first served within each."""

    def __init__(self, demand_slots: int, background_slots: int) -> None:
        self._limits = {True: demand_slots, False: background_slots}
        self._running = {True: 0, False: 0}
        self._queues: dict[bool, deque[Ticket]] = {True: deque(), False: deque()}
        self._aside: set[Ticket] = set()

    @property
    def running(self) -> int:
        """How many fetches run."""
        return self._running[True] + self._running[False]

    @property
    def queued(self) -> int:
        """How many fetches wait for a slot."""
        return len(self._queues[True]) + len(self._queues[False])

    @asynccontextmanager
    async def hold(self, ticket: Ticket) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the length of the block."""
        await self._acquire(ticket)
        try:
            yield
        finally:
            ticket.running = False
            self._running[ticket.demand] -= 1
            self._next()

    def promote(self, ticket: Ticket) -> None:
        """Somebody waits for this fetch now: it queues, or goes on, as demand."""
        if ticket.demand:
            return
        if ticket.running:
            self._running[False] -= 1
            self._running[True] += 1
        elif ticket.turn is not None:
            self._queues[False].remove(ticket)
            self._queues[True].append(ticket)
        ticket.demand = True
        ticket.aside.set()
        self._next()

    async def give_way(self, ticket: Ticket, most_s: float) -> None:
        """A background fetch stands aside while demand runs, but no longer than ``most_s``."""
        if ticket.demand or not self._is_busy:
            return
        ticket.aside.clear()
        self._aside.add(ticket)
        try:
            async with asyncio.timeout(most_s):
                await ticket.aside.wait()
        except TimeoutError:
            return
        finally:
            self._aside.discard(ticket)

    @property
    def _is_busy(self) -> bool:
        return bool(self._running[True] or self._queues[True])

    async def _acquire(self, ticket: Ticket) -> None:
        ticket.turn = asyncio.get_running_loop().create_future()
        self._queues[ticket.demand].append(ticket)
        self._next()
        try:
            await ticket.turn
        except asyncio.CancelledError:
            if ticket.running:
                ticket.running = False
                self._running[ticket.demand] -= 1
            else:
                self._queues[ticket.demand].remove(ticket)
            self._next()
            raise
        finally:
            ticket.turn = None

    def _next(self) -> None:
        """Let in whoever may run now."""
        self._admit(demand=True)
        if self._is_busy:
            return
        for ticket in self._aside:
            ticket.aside.set()
        self._admit(demand=False)

    def _admit(self, *, demand: bool) -> None:
        queue = self._queues[demand]
        while queue and self._running[demand] < self._limits[demand]:
            ticket = queue.popleft()
            ticket.running = True
            self._running[demand] += 1
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(None)
