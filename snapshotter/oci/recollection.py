"""A bounded map that forgets: what was learnt from outside must not be believed for ever.

Holds at most ``limit`` entries (the oldest go first), each for ``keep_s`` seconds of the clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from snapshotter.clock import Clock

K = TypeVar("K")
V = TypeVar("V")
_ENTRY_LIMIT = 4096


class Recollection(Generic[K, V]):
    """A bounded map whose entries vanish after ``keep_s`` seconds."""

    def __init__(self, clock: Clock, keep_s: float, limit: int = _ENTRY_LIMIT) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._limit = limit
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def put(self, key: K, value: V, keep_s: float | None = None) -> None:
        """Remember; ``keep_s`` overrides the usual time."""
        keep_s = self._keep_s if keep_s is None else keep_s
        self._entries[key] = (self._clock.monotonic_s() + keep_s, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        entry = self._entries.get(key)
        if entry is not None and self._clock.monotonic_s() >= entry[0]:
            del self._entries[key]
            entry = None
        return entry is not None

    def get(self, key: K) -> V | None:
        """What was put, None if it is forgotten."""
        entry = self._entries.get(key)
        if entry is None or key not in self:
            return None
        return entry[1]

    def drop(self, key: K) -> None:
        """Forget now."""
        self._entries.pop(key, None)

    def values(self) -> list[V]:
        """All that is remembered, and what is about to be forgotten."""
        return [value for _, value in self._entries.values()]
