"""Coming back when a registry says so: Retry-After, and one cool-down per place and credential.

All readers share the cool-down, so a registry that asked for quiet is not asked again by each of
them. While it lasts a request fails at once with BusyError and never reaches the wire, but for one
when an operator asks. No answer keeps us away for longer than a reader waits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from snapshotter.clock import Clock
from snapshotter.errors import BusyError
from snapshotter.oci.answers import error_for
from snapshotter.oci.exchange import Request, Response, Sender, origin_of, without_query
from snapshotter.oci.recollection import Recollection

RETRY_AFTER_LIMIT_S = 225.0
"""The longest that one answer keeps us away where readers wait for 300 s: each of them comes to see
one attempt, however absurd the answer was."""

_FIRST_DELAY_S = 1.0
_DELAY_LIMIT_S = 60.0


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Seconds to wait by a Retry-After header (RFC 9110, 10.2.3: seconds or a date).

    None if there is none or it makes no sense; never negative.
    """
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    when = _date(text)
    if when is None:
        return None
    return max((when - now).total_seconds(), 0.0)


def _date(text: str | None) -> datetime | None:
    try:
        when = parsedate_to_datetime(text or "")
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


@dataclass
class _CoolDown:
    until_s: float
    strikes: int
    excepted: bool = False
    """Once more it may be asked, though its time is not over."""


class CoolDowns:
    """Until when to stay away from whom. Keys are any hashable values."""

    def __init__(
        self, clock: Clock, seed: int | None = None, limit_s: float = RETRY_AFTER_LIMIT_S
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._random = random.Random(seed)
        self._entries: Recollection[object, _CoolDown] = Recollection(clock, 2 * 3600)

    def left_s(self, key: object) -> float:
        """Seconds to stay away still; 0 if it may be asked."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else max(0.0, entry.until_s - self._clock.monotonic_s())

    def except_once(self) -> None:
        """Let one request to each that wants to be left alone go out in spite of it."""
        for entry in self._entries.values():
            entry.excepted = True

    def take_exception(self, key: object) -> bool:
        """Whether this request is the one that may go out."""
        entry = self._entries.get(key)
        if entry is None or not entry.excepted:
            return False
        entry.excepted = False
        return True

    def note_busy(self, key: object, retry_after_s: float | None) -> float:
        """It asked to be left alone; returns for how many seconds it will be.

        Without a time of its own the delay doubles from one to sixty seconds, with jitter. A
        longer cool-down that is already running is kept.
        """
        now_s = self._clock.monotonic_s()
        entry = self._entries.get(key) or _CoolDown(now_s, 0)
        entry.excepted = False
        if retry_after_s is None:
            delay_s = min(_FIRST_DELAY_S * 2**entry.strikes, _DELAY_LIMIT_S)
            delay_s *= self._random.uniform(0.5, 1.0)
        else:
            delay_s = retry_after_s
        delay_s = min(delay_s, self._limit_s)
        if entry.until_s <= now_s:
            entry.strikes = min(entry.strikes + 1, 16)
        entry.until_s = max(entry.until_s, now_s + delay_s)
        self._entries.put(key, entry)
        return entry.until_s - now_s

    def note_success(self, key: object, *, excepted: bool = False) -> None:
        """It answered; the next delay starts small again. A running cool-down goes on, for the
        answer may belong to a request that was sent before: only the one excepted ends it."""
        if excepted or self.left_s(key) == 0:
            self._entries.drop(key)


class CoolingSender:
    """A Sender that turns 429, and 503 with Retry-After, into BusyError and a cool-down."""

    def __init__(self, inner: Sender, clock: Clock, limit_s: float = RETRY_AFTER_LIMIT_S) -> None:
        self._inner = inner
        self._clock = clock
        self._cool_downs = CoolDowns(clock, limit_s=limit_s)

    def except_once(self) -> None:
        """An operator wants to know: each place that asked for quiet may be asked once."""
        self._cool_downs.except_once()

    async def send(self, request: Request) -> Response:
        at_home = origin_of(request.url) == origin_of(request.host.base)
        key = (origin_of(request.url), request.identity if at_home else None)
        left_s = self._cool_downs.left_s(key)
        where = without_query(request.url)
        excepted = left_s > 0 and self._cool_downs.take_exception(key)
        if left_s > 0 and not excepted:
            raise BusyError(
                f"{where}: asked for quiet until {self._at(left_s)}, for {left_s:.1f} s more;"
                " `ember pull` asks it in spite of that",
                left_s,
            )
        response = await self._inner.send(request)
        told = response.headers.get("Retry-After")
        if response.status == 429 or (response.status == 503 and told is not None):
            now = _date(response.headers.get("Date")) or self._now()
            left_s = self._cool_downs.note_busy(key, parse_retry_after(told, now))
            error = await error_for(response, where)
            raise BusyError(
                f"{error}; it may be asked again in {left_s:.1f} s, at {self._at(left_s)}", left_s
            )
        if response.status < 500:
            self._cool_downs.note_success(key, excepted=excepted)
        return response

    def _at(self, left_s: float) -> str:
        return (self._now() + timedelta(seconds=left_s)).strftime("%H:%M:%S UTC")

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.wall_ns() / 1e9, UTC)
