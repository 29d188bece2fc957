"""The log about reads that failed: no read is left out, and a storm stays readable."""

from __future__ import annotations

import asyncio

import pytest

from snapshotter.content import Extent
from snapshotter.imagefs.complaints import LINES_EACH_MOMENT, MOMENT_S, Complaints
from tests.fakes.hand_clock import HandClock
from tests.fakes.lazy import digest

VIEW = digest("view")
OTHER = digest("other view")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


async def test_every_failed_read_has_a_line_with_view_range_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    complaints = Complaints(HandClock())
    complaints.add(f"view {VIEW}", Extent(0, 4096), "gone")
    complaints.add(f"view {VIEW}", Extent(8192, 4096), "gone")
    complaints.close()
    start = f"a reader of view {VIEW} gets an error for bytes"
    assert lines(caplog) == [f"{start} 0 to 4096: gone", f"{start} 8192 to 12288: gone"]


async def test_a_storm_is_summed_up_by_view_when_its_moment_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = HandClock()
    complaints = Complaints(clock)
    for n in range(LINES_EACH_MOMENT):
        complaints.add(f"view {VIEW}", Extent(n, 1), "gone")
    for n in (70, 50, 60):
        complaints.add(f"view {VIEW}", Extent(n, 5), f"gone {n}")
    complaints.add(f"view {OTHER}", Extent(7, 1), "lost")
    await asyncio.sleep(0)
    assert len(lines(caplog)) == LINES_EACH_MOMENT
    caplog.clear()
    await clock.advance(MOMENT_S)
    await asyncio.sleep(0)
    first, second = lines(caplog)
    assert first.startswith(f"3 more readers of view {VIEW} got errors")
    assert first.endswith("for bytes between 50 and 75; the last: gone 60")
    assert second.startswith(f"1 more readers of view {OTHER}")
    caplog.clear()
    complaints.add(f"view {VIEW}", Extent(0, 1), "again")
    assert lines(caplog) == [f"a reader of view {VIEW} gets an error for bytes 0 to 1: again"]
    complaints.close()
