"""Growth: each way against the one that it is compared with, and targets from a size on."""

from __future__ import annotations

from bench.growth import Growth
from bench.measure import Result


def grown() -> Growth:
    growth = Growth("g", "title", "GB", "s", "s", "overlayfs", {"ours": (0.15, 1.0)})
    growth.add(0.1, {"ours": [1.0, 3.0], "overlayfs": [2.0, 2.0], "unused": []})
    growth.add(10, {"ours": [1.0], "overlayfs": [100.0], "unused": []})
    return growth


def test_every_way_but_the_base_has_a_figure_at_each_size() -> None:
    small, large = grown().figures()
    assert (small.name, large.name) == ("0.1 GB: ours", "10 GB: ours")
    assert (small.ratio, large.ratio) == (1.0, 0.01)


def test_a_target_is_asked_from_its_size_on() -> None:
    small, large = grown().figures()
    assert small.target is None and large.met is True


def test_the_chart_has_all_ways_with_their_spread() -> None:
    chart = grown().chart()
    assert set(chart.lines) == {"ours", "overlayfs"}
    first = chart.lines["ours"][0]
    assert (first.x, first.y, first.low, first.high) == (0.1, 2.0, 1.0, 3.0)


def test_a_result_gets_figures_chart_and_every_value() -> None:
    result = Result()
    grown().into(result)
    assert len(result.figures) == 2 and len(result.charts) == 1
    assert result.raw["g"]["0.1"]["ours"] == [1.0, 3.0]
