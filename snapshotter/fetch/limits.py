"""How much the road may do at once and how long it keeps trying. Values only."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RoadLimits:
    """Bounds of the road. Background work has slots of its own and yields to demand.

    ``join_factor`` and ``join_bytes``: a chunk that a fetch under way will pass over is waited for
    if no more than so many times its own fetch, or so many bytes, lie before it; else it is
    fetched by itself.
    """

    miss_timeout_s: float = 300.0
    demand_slots: int = 32
    background_slots: int = 16
    """At most; how many of them an origin gets is found out by what they bring."""
    most_of_one: int | None = None
    """The most slots of each kind that one view may have, where half of all is too many."""
    workers: int = 4
    stall_s: float = 30.0
    """A tier that sends nothing for so long has failed."""
    backoff_first_s: float = 0.1
    backoff_most_s: float = 10.0
    yield_most_s: float = 2.0
    """How long a background fetch leaves its connection unread for the sake of demand."""
    window_bytes: int = 8 * MIB
    """Plain bytes that background completion asks for at a time."""
    gap_bytes: int = 16 * 1024
    gap_most_bytes: int = 128 * 1024
    """Unwanted compressed bytes that are fetched rather than asking twice: at least and at most, by
    what a request costs."""
    join_factor: int = 4
    join_bytes: int = 256 * 1024
