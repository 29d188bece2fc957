"""How many background fetches from one origin at once are worth it, found out by what they bring.

More are tried while more bring more: an origin that throttles each connection gets many, a link
that is full gets no more than fill it. One that answers 429 gets half at once, and no more than
that for a while. It only counts: the slots let in who may run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from snapshotter.clock import Clock
from snapshotter.errors import BusyError, UnavailableError

_WINDOW_S = 0.5
"""For how long a number is tried before it is judged."""
_IN_USE = 0.8
"""A window in which fewer connections were open than this share of the allowed says nothing."""
_WORTH = 0.5
"""More connections stay if each brings at least this share of what one brought before."""
_SETTLED_WINDOWS = 16
"""So many windows pass after more were not worth it, before more are tried again."""
_REFUSED_S = 60.0
"""For how long an origin gets no more connections than it put up with."""
_ORIGINS = 256


class Connections:
    """Those of one origin; event loop only.

    Life: ``with running()`` around each ranged read, ``received`` for each piece of it. An error
    that leaves the block is learnt from and goes on. ``grown`` is called when more are allowed.
    """

    def __init__(
        self, clock: Clock, *, most: int, first: int = 4, grown: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._most = max(1, most)
        self._grown = grown
        self.allowed = min(self._most, max(1, first))
        """So many may run now."""
        self.open = 0
        self._ramping = True
        self._rest = 0
        self._before: tuple[int, float] | None = None
        """The number that was judged last, and the bytes a second that it brought."""
        self._ceiling = self._most
        self._ceiling_until_s = self._refused_s = -_REFUSED_S
        self._ended = self._broken = 0
        self._bytes = 0
        self._used_s = 0.0
        self._began_s = self._noted_s = clock.monotonic_s()

    @contextmanager
    def running(self) -> Iterator[None]:
        """One more runs for the length of the block."""
        self._note()
        self.open += 1
        try:
            yield
        except BusyError:
            self._refused()
            raise
        except UnavailableError:
            self._broke()
            raise
        else:
            self._ended += 1
        finally:
            self._note()
            self.open -= 1

    def received(self, length_bytes: int) -> None:
        """So many bytes have come."""
        self._bytes += length_bytes
        self._note()
        if self._noted_s - self._began_s >= _WINDOW_S:
            self._judge()

    def _note(self) -> None:
        """Count the time that connections were open until now; to come before each change."""
        now_s = self._clock.monotonic_s()
        self._used_s += (now_s - self._noted_s) * self.open
        self._noted_s = now_s

    def _judge(self) -> None:
        """A window is over: was the number worth it, and what is tried next?"""
        took_s = self._noted_s - self._began_s
        used, rate = self._used_s / took_s, self._bytes / took_s
        self._next_window()
        if used < _IN_USE * self.allowed:
            return
        if self._before is not None and self.allowed > self._before[0]:
            count, brought = self._before
            if rate - brought < _WORTH * brought / count * (self.allowed - count):
                self.allowed = count
                self._ramping, self._rest = False, _SETTLED_WINDOWS
                return
        self._before = (self.allowed, rate)
        if self._rest:
            self._rest -= 1
        else:
            self._grow()

    def _grow(self) -> None:
        if self._noted_s >= self._ceiling_until_s:
            self._ceiling = self._most
        more = self.allowed if self._ramping else max(1, self.allowed // 4)
        self.allowed = min(self._ceiling, self.allowed + more)
        self._grown()

    def _refused(self) -> None:
        """It asked for quiet. All that are open may say so at once: that is one refusal."""
        now_s = self._clock.monotonic_s()
        if now_s - self._refused_s >= _WINDOW_S:
            self._refused_s = now_s
            self._shrink(max(1, min(self.allowed, self.open) // 2))

    def _broke(self) -> None:
        """One connection in ten may break anywhere; where most do, fewer may do better."""
        self._broken += 1
        if self._broken > max(2, self._ended):
            self._shrink(max(1, self.allowed - max(1, self.allowed // 4)))

    def _shrink(self, count: int) -> None:
        self.allowed = self._ceiling = count
        self._ceiling_until_s = self._clock.monotonic_s() + _REFUSED_S
        self._ramping, self._before = False, None
        self._next_window()

    def _next_window(self) -> None:
        self._note()
        self._began_s = self._noted_s
        self._used_s, self._bytes = 0.0, 0
        self._ended = self._broken = 0


class Origins:
    """Of every origin, made when it is first asked; those used least are forgotten."""

    def __init__(self, clock: Clock, *, most: int) -> None:
        self.grown: Callable[[], None] = lambda: None
        """Called when an origin is allowed more."""
        self._clock = clock
        self._most = most
        self._known: OrderedDict[str, Connections] = OrderedDict()

    def of(self, origin: str) -> Connections:
        """Those of a registry (`origin_of` names it)."""
        known = self._known.get(origin)
        if known is None:
            known = self._known[origin] = Connections(
                self._clock, most=self._most, grown=lambda: self.grown()
            )
        self._known.move_to_end(origin)
        for idle in [other for other in self._known if not self._known[other].open]:
            if len(self._known) <= _ORIGINS:
                break
            if idle != origin:
                del self._known[idle]
        return known

    def allowed(self, origin: str) -> int:
        """How many fetches from there may run now."""
        return self.of(origin).allowed


def origin_of(repository: str) -> str:
    """The registry that ``repository`` (``host[:port]/path``) lies in."""
    return repository.partition("/")[0]
