"""How fast a registry's layers come: bytes of all its streams over the time in which any ran.

Streams run side by side and share one link, so what a single one reaches says little: an image
comes at the rate of all. Time in which nothing was streamed does not count. Pure but for the clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from snapshotter.clock import Clock

REGISTRIES = 1024
LEAST_BYTES = 1024 * 1024
"""Less than this says more of the first byte's delay than of the link."""
MEMORY_BYTES = 64 * 1024 * 1024
"""What was measured before counts as if it were so much: a link that changes is soon known."""


@dataclass(slots=True)
class _Meter:
    """Since ``since_s`` ``fresh_bytes`` have come; before that ``known_bytes`` in ``known_s``."""

    streams: int = 0
    since_s: float = 0.0
    fresh_bytes: int = 0
    known_bytes: float = 0.0
    known_s: float = 0.0

    def learn(self, now_s: float) -> None:
        took_s = now_s - self.since_s
        if self.fresh_bytes < LEAST_BYTES or took_s <= 0:
            return
        share = min(1.0, MEMORY_BYTES / self.known_bytes) if self.known_bytes else 0.0
        self.known_bytes = share * self.known_bytes + self.fresh_bytes
        self.known_s = share * self.known_s + took_s
        self.since_s, self.fresh_bytes = now_s, 0


class Rates:
    """Bytes a second by registry; ``assumed`` for one that nothing was streamed from yet."""

    def __init__(self, assumed: int, clock: Clock) -> None:
        self._assumed = float(assumed)
        self._clock = clock
        self._meters: dict[str, _Meter] = {}

    def of(self, registry: str) -> float:
        """Compressed bytes a second that ``registry`` has reached lately."""
        meter = self._meters.get(registry)
        if meter is None or not meter.known_s:
            return self._assumed
        return meter.known_bytes / meter.known_s

    @contextlib.contextmanager
    def streaming(self, registry: str) -> Iterator[Callable[[int], None]]:
        """While a stream runs; what is yielded takes how many bytes have come.

        A stream that fails has told nothing, if no other runs beside it.
        """
        meter = self._meter(registry)
        if not meter.streams:
            meter.since_s, meter.fresh_bytes = self._clock.monotonic_s(), 0
        meter.streams += 1

        def came(count_bytes: int) -> None:
            meter.fresh_bytes += count_bytes

        try:
            yield came
            meter.learn(self._clock.monotonic_s())
        finally:
            meter.streams -= 1

    def _meter(self, registry: str) -> _Meter:
        known = self._meters.get(registry)
        if known is not None:
            return known
        if len(self._meters) >= REGISTRIES:
            idle = [name for name, meter in self._meters.items() if not meter.streams]
            for name in idle[:1]:
                del self._meters[name]
        return self._meters.setdefault(registry, _Meter())
