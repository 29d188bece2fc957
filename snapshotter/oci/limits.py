"""How long an exchange may take and how much of it there may be at once. Values and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Deadlines in seconds, and how many connections may be open.

    ``slowest_bytes_per_s`` is the least that a body must bring over ``idle_s``; without it a
    server that sends a byte now and then would hold its reader for ever. ``keep_s`` is how long
    an idle connection is kept.
    """

    connect_s: float = 10.0
    idle_s: float = 30.0
    queue_s: float = 60.0
    keep_s: float = 60.0
    slowest_bytes_per_s: int = 512
    connections: int = 256
    connections_per_host: int = 64


class Pace:
    """Holds a body to a least speed, counting only the time spent waiting for it."""

    def __init__(self, window_s: float, bytes_per_s: int) -> None:
        self._window_s = window_s
        self._least_bytes = bytes_per_s * window_s
        self._waited_s = 0.0
        self._bytes = 0

    def too_slow(self, waited_s: float, length: int) -> bool:
        """Note ``length`` bytes that took ``waited_s``; True once a whole window was too slow."""
        self._waited_s += waited_s
        self._bytes += length
        if self._waited_s < self._window_s:
            return False
        slow = self._bytes < self._least_bytes
        self._waited_s, self._bytes = 0.0, 0
        return slow
