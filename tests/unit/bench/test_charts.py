"""Charts: round axes, points where their values say, nothing drawn that cannot be shown."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.charts import Bar, Chart, Point, line_chart, ratio_chart, scale, short, ticks

SVG = "{http://www.w3.org/2000/svg}"
LINES = {
    "ours & theirs": [Point(1, 0.5, 0.4, 0.7), Point(100, 5)],
    "overlayfs": [Point(100, 2), Point(1, 1)],
}


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def chart(lines: dict[str, list[Point]], *, log: bool = True) -> Chart:
    return Chart("name", "Title <1>", "containers", "s", lines, log_x=log, log_y=log)


def test_a_line_chart_names_its_lines_and_its_axes() -> None:
    root = parsed(line_chart(chart(LINES)))
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert {"Title <1>", "containers", "s", "ours & theirs", "overlayfs"} <= set(words)
    assert len(list(root.iter(f"{SVG}polyline"))) == 2


def test_points_are_drawn_in_the_order_of_the_axis_and_can_be_read() -> None:
    root = parsed(line_chart(chart(LINES)))
    first, second = root.iter(f"{SVG}polyline")
    for line in (first, second):
        across = [float(point.split(",")[0]) for point in line.attrib["points"].split()]
        assert across == sorted(across)
    said = [node.findtext(f"{SVG}title") for node in root.iter(f"{SVG}circle")]
    assert said[0] == "ours & theirs: 0.5 at 1"


def test_higher_values_are_higher_up() -> None:
    low, high = parsed(line_chart(chart({"a": [Point(1, 1), Point(10, 9)]}))).iter(f"{SVG}circle")
    assert float(low.attrib["cy"]) > float(high.attrib["cy"])


def test_only_points_of_several_values_have_whiskers() -> None:
    bare = line_chart(chart({"a": [Point(1, 1), Point(10, 9)]}))
    spread = line_chart(chart({"a": [Point(1, 1, 1, 9), Point(10, 9)]}))
    assert spread.count("<line ") == bare.count("<line ") + 1


@pytest.mark.parametrize(
    "lines",
    [{}, {"a": []}, {"a": [Point(0, 1)]}, {"a": [Point(1, 0)]}, {"a": [Point(1, 1, -1, 2)]}],
)
def test_what_cannot_be_drawn_is_refused(lines: dict[str, list[Point]]) -> None:
    with pytest.raises(ValueError, match="name"):
        line_chart(chart(lines))


def test_a_plain_axis_begins_at_nothing() -> None:
    words = [n.text for n in parsed(line_chart(chart(LINES, log=False))).iter(f"{SVG}text")]
    assert words.count("0") == 2


def test_bars_say_what_is_missed() -> None:
    root = parsed(ratio_chart("case", [Bar("a", 2.0, 1.5, met=False), Bar("b", 0.5)]))
    missed, other = [n for n in root.iter(f"{SVG}rect") if n.find(f"{SVG}title") is not None]
    assert missed.attrib["fill"] != other.attrib["fill"]
    assert float(missed.attrib["width"]) == pytest.approx(4 * float(other.attrib["width"]), abs=0.2)


def test_a_chart_without_bars_is_refused() -> None:
    with pytest.raises(ValueError, match="no ratio"):
        ratio_chart("case", [])


@given(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9), st.booleans())
def test_ticks_hold_what_they_were_asked_for(one: float, other: float, logarithmic: bool) -> None:
    low, high = min(one, other), max(one, other)
    marks = ticks(low, high, logarithmic=logarithmic)
    assert marks[0] <= low * (1 + 1e-9) and marks[-1] >= high * (1 - 1e-9)
    assert 2 <= len(marks) <= 17
    assert marks == sorted(set(marks))


def test_a_scale_goes_from_its_first_mark_to_its_last() -> None:
    across = scale([1.0, 10.0, 100.0], 50, 250, log=True)
    assert [across(mark) for mark in (1.0, 10.0, 100.0)] == [50, 150, 250]


@pytest.mark.parametrize(
    ("value", "said"), [(0.123456, "0.123"), (12, "12"), (100_000, "100k"), (2.5e6, "2.5M")]
)
def test_numbers_on_axes_are_short(value: float, said: str) -> None:
    assert short(value) == said
