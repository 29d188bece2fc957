"""Who waits for which chunk of one view, and which job is going to bring it.

Invariant: every chunk that somebody waits for has a job or is about to be planned. All of it runs
in the event loop and none of it waits. It does not know how a chunk is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from snapshotter.errors import EmberError, restated


class Carrier(Protocol):
    """A job, as the board sees it."""

    def promote(self) -> None:
        """Somebody waits for it now."""
        ...


class Waiter:
    """One request: wakes when all of its chunks are here, or when one of them cannot be had."""

    __slots__ = ("_why_not", "demand", "left")

    def __init__(self, chunks: Iterable[int], *, demand: bool) -> None:
        self.left = set(chunks)
        self.demand = demand
        self._why_not: asyncio.Future[EmberError | None]
        self._why_not = asyncio.get_running_loop().create_future()

    async def served(self) -> None:
        """Return when all of them are here; raises why one of them will not be."""
        why_not = await self._why_not
        if why_not is not None:
            raise restated(why_not)

    def arrived(self, number: int) -> None:
        """One chunk less to wait for."""
        self.left.discard(number)
        if not self.left and not self._why_not.done():
            self._why_not.set_result(None)

    def fail(self, error: EmberError) -> None:
        """It will not be."""
        if not self._why_not.done():
            self._why_not.set_result(restated(error))


class Board:
    """The chunks of one view that are under way."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Waiter]] = {}
        self.carriers: dict[int, Carrier] = {}

    def wait(self, chunks: Iterable[int], *, demand: bool) -> Waiter:
        """A waiter for ``chunks``, entered under each."""
        waiter = Waiter(chunks, demand=demand)
        for number in waiter.left:
            self._waiting.setdefault(number, []).append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> set[int]:
        """Take a waiter off; the chunks that nobody waits for any more."""
        abandoned = set()
        for number in waiter.left:
            waiters = self._waiting.get(number, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if number in self._waiting and not waiters:
                del self._waiting[number]
                abandoned.add(number)
        return abandoned

    def is_wanted(self, number: int) -> bool:
        """Whether anybody waits for chunk ``number``."""
        return number in self._waiting

    def is_demanded(self, number: int) -> bool:
        """Whether any of those who wait for chunk ``number`` is a reader."""
        return any(waiter.demand for waiter in self._waiting.get(number, ()))

    @property
    def waited_for(self) -> list[int]:
        """All chunks that somebody waits for."""
        return sorted(self._waiting)

    def arrived(self, number: int) -> None:
        """Chunk ``number`` can be read: wake who waits for it."""
        self.carriers.pop(number, None)
        for waiter in self._waiting.pop(number, ()):
            waiter.arrived(number)

    def fail(self, number: int, error: EmberError) -> None:
        """Chunk ``number`` cannot be had: tell who waits for it."""
        for waiter in list(self._waiting.get(number, ())):
            self.leave(waiter)
            waiter.fail(error)

    def assign(self, carrier: Carrier, chunks: Iterable[int], *, steal: bool = False) -> None:
        """``carrier`` brings ``chunks``, or with ``steal`` false those that no other one does."""
        for number in chunks:
            if steal or number not in self.carriers:
                self.carriers[number] = carrier

    def dismiss(self, carrier: Carrier) -> None:
        """``carrier`` brings nothing any more."""
        for number in [number for number, by in self.carriers.items() if by is carrier]:
            del self.carriers[number]
