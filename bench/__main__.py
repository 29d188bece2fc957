"""`python -m bench`: run measurements and print them as tables, JSON or Markdown.

Every file of bench/cases is a case with a name, found by looking, so a new one needs no list.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import bench.cases
from bench.bed.process import BedError
from bench.measure import Case, Figure, Result, Settings, machine
from bench.progress import Progress


def all_cases() -> dict[str, Case]:
    found = {}
    for module in pkgutil.iter_modules(bench.cases.__path__):
        case: Case = importlib.import_module(f"bench.cases.{module.name}").CASE
        found[case.name] = case
    return dict(sorted(found.items()))


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def cells(figure: Figure) -> list[str]:
    sign = "≥" if figure.at_least else "≤"
    target = f"{sign} {number(figure.target)}" if figure.target is not None else "–"
    met = {True: "yes", False: "NO", None: ""}[figure.met]
    name = f"{figure.name} ({figure.unit})"
    theirs = number(figure.theirs) + (f" {figure.against}" if figure.against else "")
    return [name, number(figure.ours), theirs, number(figure.ratio), target, met]


HEADING = ("", "Ember", "compared with", "ratio", "target", "met")


def markdown(case: Case, result: Result) -> str:
    lines = [f"## {case.name}", "", f"{case.shows}.", ""]
    lines += [f"| {' | '.join(HEADING)} |", f"|{'---|' * len(HEADING)}"]
    lines += [f"| {' | '.join(cells(figure))} |" for figure in result.figures]
    lines += ["", *result.notes] if result.notes else []
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


def arguments(cases: dict[str, Case]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", help="which to run (see --list)")
    parser.add_argument("--list", action="store_true", help="name the cases and what they show")
    parser.add_argument("--all", action="store_true", help="run every case")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each [3]")
    parser.add_argument("--quick", action="store_true", help="small and short: only a trial")
    parser.add_argument("--rate", type=float, default=200.0, help="of the link, Mbit/s [200]")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the link, each way [0]")
    parser.add_argument("--containerd", type=int, choices=(1, 2), default=2, help="major version")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--markdown", action="store_true", help="Markdown on standard output")
    options = parser.parse_args()
    unknown = set(options.case) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list names them")
    if not (options.list or options.all or options.case):
        parser.error("name a case, or say --all or --list")
    return options


def run_cases(chosen: list[Case], options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    settings = Settings(
        rounds=1 if options.quick else options.rounds,
        quick=options.quick,
        rate_mbit=options.rate,
        delay_ms=options.delay_ms,
        containerd=options.containerd,
    )
    say = Progress()
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    document: dict[str, Any] = {"machine": machine(), "quick": settings.quick, "cases": {}}
    failed = False
    for case in chosen:
        say(f"{case.name}: {case.shows}")
        start = time.monotonic()
        try:
            result = case.run(settings, say)
        except Exception as error:  # the other cases are still worth running
            if not isinstance(error, BedError | OSError):
                traceback.print_exc()
            say(f"{case.name} failed: {error}")
            document["cases"][case.name] = {"failed": str(error)}
            failed = True
            continue
        if options.markdown:
            print(markdown(case, result), flush=True)
        else:
            show(case, result, console)
        document["cases"][case.name] = {
            "shows": case.shows,
            "seconds": round(time.monotonic() - start, 1),
            "figures": [figure.document() for figure in result.figures],
            "notes": result.notes,
            "raw": result.raw,
        }
        if options.json:  # after each case: a run that is cut short keeps what it has
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    return document, failed


def ended(signal_number: int, _frame: object) -> None:
    """A signal ends a run the way an error does: with everything cleaned up."""
    raise SystemExit(128 + signal_number)


def main() -> int:
    cases = all_cases()
    options = arguments(cases)
    if options.list:
        width = max(map(len, cases))
        for case in cases.values():
            print(f"{case.name:{width}}  {case.shows}")
        return 0
    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGHUP, ended)
    chosen = list(cases.values()) if options.all else [cases[name] for name in options.case]
    _, failed = run_cases(chosen, options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
