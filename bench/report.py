"""Results as people and programs read them: tables, Markdown, JSON, and charts in a folder.

What is written as JSON can be read back and shown again, but for ``raw``, which is for doubters.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bed.process import BedError
from bench.charts import Bar, Chart, Point, line_chart, ratio_chart
from bench.measure import Case, Figure, Result

HEADING = ("", "Ember", "compared with", "ratio", "target", "met")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# Longer names and titles are cut in a chart; the text beside it has them whole.
BAR_NAME, TITLE = 38, 84


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def cut(text: str, most: int) -> str:
    """The text, or what fits of it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def with_spread(value: float | None, spread: tuple[float, float] | None) -> str:
    """A median and, behind it, the least and the most that was seen."""
    if spread is None:
        return number(value)
    return f"{number(value)} ({number(spread[0])}–{number(spread[1])})"


def cells(figure: Figure) -> list[str]:
    sign = "≥" if figure.at_least else "≤"
    target = f"{sign} {number(figure.target)}" if figure.target is not None else "–"
    met = {True: "yes", False: "NO", None: ""}[figure.met]
    name = f"{figure.name} ({figure.unit})" if figure.unit else figure.name
    theirs = with_spread(figure.theirs, figure.theirs_spread)
    theirs += f" {figure.against}" if figure.against else ""
    ours = with_spread(figure.ours, figure.spread)
    return [name, ours, theirs, number(figure.ratio), target, met]


def put_between_marks(path: Path, measured: str) -> None:
    """Replace what stands between the two marks of a Markdown file; what is around them stays."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise BedError(f"{path}: no lines {BEGIN} and {END} to put results between")
    path.write_text(f"{head}{BEGIN}\n\n{measured.strip()}\n\n{END}{tail}", encoding="utf-8")


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line, to stand over a table."""
    return (
        f"Machine: Linux {machine['kernel']}, {machine['cpus']} × {machine['processor']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['file_system']}; "
        f"Python {machine['python']}."
    )


def markdown(case: Case, result: Result, rounds: int, plots: str = "") -> str:
    """One case as Markdown; ``plots`` is where its charts lie, as seen from the text."""
    shows = case.shows[:1].upper() + case.shows[1:]
    measured = f"{rounds} rounds" if rounds > 1 else "One round: a trial, no result"
    lines = [f"## {case.name}", "", f"{shows}. Target: {case.target}. {measured}.", ""]
    lines += [f"| {' | '.join(HEADING)} |", f"|{'---|' * len(HEADING)}"]
    lines += [f"| {' | '.join(cells(figure))} |" for figure in result.figures]
    for note in result.notes:
        lines += ["", note]
    if plots:
        lines.append("")
        lines += [f"![{name}]({plots}/{name}.svg)" for name in charts(case, result)]
    return "\n".join(lines) + "\n"


def show(case: Case, result: Result, console: Console) -> None:
    table = Table(title=f"{case.name}: {case.shows}", title_justify="left")
    for column in HEADING:
        table.add_column(column, justify="right" if column else "left")
    for figure in result.figures:
        table.add_row(*cells(figure))
    console.print(table)
    for note in result.notes:
        console.print(note, highlight=False)


def document(case: Case, result: Result, seconds: float) -> dict[str, Any]:
    """One case for a program: figures, notes and every single value."""
    return {
        "shows": case.shows,
        "target": case.target,
        "seconds": round(seconds, 1),
        "figures": [figure.document() for figure in result.figures],
        "notes": result.notes,
        "charts": [asdict(chart) for chart in result.charts],
        "raw": result.raw,
    }


def read_document(path: Path) -> dict[str, Any]:
    """A JSON file of results; BedError if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BedError(f"{path}: not a file of results: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("cases"), dict):
        raise BedError(f"{path}: not a file of results: it has no cases")
    return found


def read_result(entry: dict[str, Any]) -> Result:
    """The result that ``document`` wrote, without what is only in ``raw``."""
    return Result(
        [Figure.read(row) for row in entry["figures"]],
        notes=list(entry["notes"]),
        charts=[
            Chart(
                **{
                    **chart,
                    "lines": {
                        name: [Point(**point) for point in line]
                        for name, line in chart["lines"].items()
                    },
                }
            )
            for chart in entry["charts"]
        ],
    )


def charts(case: Case, result: Result) -> dict[str, str]:
    """The charts of a case as SVG by name: its ratios, and what it says of growth."""
    drawn = {}
    bars = [
        Bar(cut(figure.name, BAR_NAME), figure.ratio, figure.target, figure.met)
        for figure in result.figures
        if figure.ratio is not None
    ]
    if bars:
        title = f"{case.name}: {case.shows}"
        drawn[case.name] = ratio_chart(cut(title, TITLE), bars)
    for chart in result.charts:
        drawn[chart.name] = line_chart(chart)
    return drawn


def write_charts(case: Case, result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in charts(case, result).items():
        (folder / f"{name}.svg").write_text(drawing, encoding="utf-8")
