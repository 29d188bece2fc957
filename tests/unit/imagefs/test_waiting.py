"""Reads that wait are seen while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from snapshotter.content import Extent
from snapshotter.imagefs.waiting import AGAIN_S, LONG_S, WaitingReads
from snapshotter.metrics import Metrics
from tests.fakes.hand_clock import HandClock
from tests.fakes.lazy import digest

VIEW, OTHER = digest("view"), digest("other")


async def pass_by(clock: HandClock, duration_s: float) -> None:
    for _ in range(round(duration_s)):
        await clock.advance(1.0)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_who_waits_is_told_longest_first_with_the_reason() -> None:
    clock = HandClock()
    waiting = WaitingReads(clock, lambda view: "registry: gone" if view == VIEW else "")
    metrics = Metrics()
    waiting.publish(metrics)
    with waiting.during(OTHER, Extent(5, 6)):
        await clock.advance(3.0)
        with waiting.during(VIEW, Extent(0, 10)), waiting.during(VIEW, Extent(50, 10)):
            await clock.advance(2.0)
            first, second = waiting.now()
            assert (first.view, first.count, first.longest_s) == (OTHER, 1, 5.0)
            assert (second.view, second.count, second.longest_s) == (VIEW, 2, 2.0)
            assert (second.extent, second.why) == (Extent(0, 10), "registry: gone")
            shown = metrics.render().decode()
            assert "ember_reads_waiting 3.0" in shown
            assert "ember_longest_wait_seconds 5.0" in shown
    assert waiting.now() == []
    assert "ember_longest_wait_seconds 0.0" in metrics.render().decode()
    waiting.close()


async def test_a_long_wait_is_in_the_log_while_it_lasts_once_a_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    clock = HandClock()
    waiting = WaitingReads(clock, lambda view: "registry: connection refused")
    with waiting.during(OTHER, Extent(0, 10)):
        await pass_by(clock, LONG_S / 2)
    assert caplog.messages == []
    with contextlib.ExitStack() as readers:
        for offset in range(100):
            readers.enter_context(waiting.during(VIEW, Extent(offset, 10)))
        await pass_by(clock, LONG_S * 2)
        (line,) = caplog.messages
        assert str(VIEW) in line
        assert "100 of them" in line
        assert "registry: connection refused" in line
        await pass_by(clock, AGAIN_S)
        assert len(caplog.messages) == 2
    await pass_by(clock, AGAIN_S * 2)
    assert len(caplog.messages) == 2
    assert clock.sleepers == 0
    waiting.close()
