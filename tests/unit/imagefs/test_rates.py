"""A registry's rate is that of all its streams together, over the time in which any of them ran."""

from __future__ import annotations

import contextlib

import pytest

from snapshotter.imagefs import rates
from snapshotter.imagefs.rates import Rates
from tests.fakes.skipping_clock import SkippingClock

MEGA = 1_000_000
HERE = "r.example"


@pytest.fixture
def clock() -> SkippingClock:
    return SkippingClock()


def measure(known: Rates, clock: SkippingClock, streams: int, size: int, took_s: float) -> None:
    """``streams`` of ``size`` bytes each run side by side and end together after ``took_s``."""
    with contextlib.ExitStack() as running:
        came = [running.enter_context(known.streaming(HERE)) for _ in range(streams)]
        clock.now_s += took_s
        for each in came:
            each(size)


def test_what_was_never_measured_is_assumed(clock: SkippingClock) -> None:
    known = Rates(7, clock)
    measure(known, clock, 1, rates.LEAST_BYTES - 1, 1)
    assert known.of(HERE) == 7


@pytest.mark.parametrize("streams", [1, 4])
def test_streams_that_share_a_link_are_measured_together(
    clock: SkippingClock, streams: int
) -> None:
    known = Rates(1, clock)
    measure(known, clock, streams, 8 * MEGA // streams, 2)
    assert known.of(HERE) == 4 * MEGA
    assert known.of("other.example") == 1


def test_streams_that_end_one_after_the_other_count_no_time_twice(clock: SkippingClock) -> None:
    known = Rates(1, clock)
    with known.streaming(HERE) as long:
        for _ in range(5):
            with known.streaming(HERE) as short:
                clock.now_s += 1
                short(3 * MEGA)
                long(MEGA)
            assert known.of(HERE) == pytest.approx(4 * MEGA)
    assert known.of(HERE) == pytest.approx(4 * MEGA)


def test_time_without_any_stream_is_no_streaming_time(clock: SkippingClock) -> None:
    known = Rates(1, clock)
    for _ in range(3):
        measure(known, clock, 2, MEGA, 1)
        clock.now_s += 3600
    assert known.of(HERE) == pytest.approx(2 * MEGA)


def test_a_stream_that_failed_tells_nothing(clock: SkippingClock) -> None:
    known = Rates(1, clock)
    measure(known, clock, 1, 2 * MEGA, 1)
    with contextlib.suppress(RuntimeError), known.streaming(HERE) as came:
        came(2 * MEGA)
        clock.now_s += 600
        raise RuntimeError("hung, and was given up")
    measure(known, clock, 1, 2 * MEGA, 1)
    assert known.of(HERE) == pytest.approx(2 * MEGA)


def test_a_link_that_has_changed_is_soon_known(clock: SkippingClock) -> None:
    known = Rates(1, clock)
    for _ in range(10):
        measure(known, clock, 4, 100 * MEGA, 4)
    measure(known, clock, 4, 100 * MEGA, 400)
    assert known.of(HERE) < 2 * MEGA


def test_no_more_registries_are_remembered_than_allowed(clock: SkippingClock) -> None:
    known = Rates(1, clock)
    measure(known, clock, 1, 2 * MEGA, 1)
    for n in range(rates.REGISTRIES):
        with known.streaming(f"{n}.example"):
            clock.now_s += 1
    assert known.of(HERE) == 1
