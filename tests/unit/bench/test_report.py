"""Results as text: what a figure says, what is kept, and that what is kept can be shown again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.bed.process import BedError
from bench.charts import Chart, Point
from bench.measure import Case, Figure, Result, Settings, alternate
from bench.progress import Progress
from bench.report import (
    BEGIN,
    END,
    cells,
    charts,
    cut,
    document,
    machine_line,
    markdown,
    put_between_marks,
    read_document,
    read_result,
    write_charts,
)

MACHINE: dict[str, Any] = {
    "kernel": "6.18",
    "cpus": 2,
    "processor": "Some CPU",
    "memory_bytes": 24 << 30,
    "file_system": "ext4",
    "python": "3.11",
}


def nothing(settings: Settings, say: Progress) -> Result:
    return Result()


CASE = Case("reads", "reads against overlayfs", nothing, "at most 1.03")
SAID = "Reads against overlayfs. Target: at most 1.03. 3 rounds."
RESULT = Result(
    [
        Figure.of("cold", "s", [3.0, 1.0, 2.0], [1.0, 2.0, 4.0], 1.03, against="overlayfs"),
        Figure("size", "bytes", 1234567),
    ],
    {"cold": [1.0]},
    ["A note."],
    [Chart("grows", "It grows", "files", "s", {"ours": [Point(1, 2, 1, 3), Point(10, 4)]})],
)


def test_a_figure_has_medians_and_what_lies_around_them() -> None:
    cold = RESULT.figures[0]
    assert (cold.ours, cold.theirs, cold.ratio) == (2.0, 2.0, 1.0)
    assert (cold.spread, cold.theirs_spread) == ((1.0, 3.0), (1.0, 4.0))
    assert cold.met is True


def test_a_single_value_has_no_spread() -> None:
    figure = Figure.of("x", "s", [2.0])
    assert figure.spread is None and figure.theirs is None
    assert cells(figure) == ["x (s)", "2", "–", "–", "–", ""]


def test_a_row_says_what_is_missed_and_how_far_values_lie_apart() -> None:
    figure = Figure.of("x", "s", [9.0, 10.0, 12.0], [5.0], 1.5, against="overlayfs")
    assert cells(figure) == ["x (s)", "10 (9–12)", "5 overlayfs", "2", "≤ 1.5", "NO"]


def test_a_least_target_is_met_from_above() -> None:
    figure = Figure.of("rate", "Mbit/s", [190.0], [200.0], 0.9, at_least=True)
    assert figure.met is True and cells(figure)[4] == "≥ 0.9"


def test_markdown_has_target_table_notes_and_charts() -> None:
    lines = markdown(CASE, RESULT, 3, "plots").splitlines()
    assert lines[:3] == ["## reads", "", SAID]
    assert "| cold (s) | 2 (1–3) | 2 (1–4) overlayfs | 1 | ≤ 1.03 | yes |" in lines
    assert "| size (bytes) | 1,234,567 | – | – | – |  |" in lines
    assert lines[-2:] == ["![reads](plots/reads.svg)", "![grows](plots/grows.svg)"]
    assert "A note." in lines


def test_markdown_without_charts_names_none() -> None:
    assert "![" not in markdown(CASE, RESULT, 3)


def test_what_is_kept_can_be_shown_again() -> None:
    kept = json.loads(json.dumps(document(CASE, RESULT, 1.0)))
    again = read_result(kept)
    assert again.figures == RESULT.figures
    assert markdown(CASE, again, 3, "plots") == markdown(CASE, RESULT, 3, "plots")
    assert charts(CASE, again) == charts(CASE, RESULT)
    assert kept["raw"] == {"cold": [1.0]} and kept["target"] == "at most 1.03"


@pytest.mark.parametrize("text", ["", "[]", '{"cases": 1}', "{"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    with pytest.raises(BedError, match="not a file of results"):
        read_document(path)


def test_charts_are_written_one_file_each(tmp_path: Path) -> None:
    write_charts(CASE, RESULT, tmp_path / "plots")
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["grows.svg", "reads.svg"]


def test_a_case_without_ratios_has_no_bars() -> None:
    assert charts(CASE, Result([Figure("size", "bytes", 1)])) == {}


def test_what_does_not_fit_is_cut() -> None:
    assert (cut("12345", 5), cut("123456", 5)) == ("12345", "1234…")


def test_a_single_round_is_no_result() -> None:
    assert "One round: a trial, no result." in markdown(CASE, RESULT, 1)


def test_the_machine_is_one_line() -> None:
    said = "Machine: Linux 6.18, 2 × Some CPU, 24 GiB, ext4; Python 3.11."
    assert machine_line(MACHINE) == said


def test_ways_take_turns_and_every_second_round_goes_back() -> None:
    done: list[str] = []

    def way(name: str) -> float:
        done.append(name)
        return float(len(done))

    values = alternate({"a": lambda: way("a"), "b": lambda: way("b")}, 3, Progress())
    assert "".join(done) == "abbaab"
    assert values == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_results_are_put_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text(f"# Results\n{BEGIN}\nold\n{END}\n## Why\n")
    put_between_marks(page, "## new\n")
    put_between_marks(page, "## newer\n")
    assert page.read_text() == f"# Results\n{BEGIN}\n\n## newer\n\n{END}\n## Why\n"


def test_a_page_without_marks_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"mine {END}")
    with pytest.raises(BedError, match="to put results between"):
        put_between_marks(page, "new")
    assert page.read_text() == f"mine {END}"


def test_our_own_page_has_the_marks() -> None:
    text = (Path(__file__).parents[3] / "bench" / "RESULTS.md").read_text()
    assert text.index(BEGIN) < text.index(END)
