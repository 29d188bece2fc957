"""`python -m bench`: run measurements and print them as tables, JSON, Markdown or charts.

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

import bench.cases
from bench.bed.process import BedError
from bench.measure import Case, Result, Settings, machine
from bench.progress import Progress
from bench.report import (
    document,
    machine_line,
    markdown,
    put_between_marks,
    read_document,
    read_result,
    show,
    write_charts,
)


def all_cases() -> dict[str, Case]:
    found = {}
    for module in pkgutil.iter_modules(bench.cases.__path__):
        case: Case = importlib.import_module(f"bench.cases.{module.name}").CASE
        found[case.name] = case
    return dict(sorted(found.items()))


def points(text: str) -> tuple[float, ...]:
    """`1,10,100` as numbers; argparse says what is wrong with anything else."""
    found = tuple(float(part) for part in text.split(","))
    if not found or min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: numbers above 0, with commas between")
    return found


def arguments(cases: dict[str, Case], words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", help="which to run (see --list)")
    parser.add_argument("--list", action="store_true", help="name the cases, what each shows")
    parser.add_argument("--all", action="store_true", help="run every case but the large ones")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each [3]")
    parser.add_argument("--quick", action="store_true", help="small and short: only a trial")
    parser.add_argument("--rate", type=float, default=200.0, help="of the link, Mbit/s [200]")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the link, each way [0]")
    parser.add_argument("--containerd", type=int, choices=(1, 2), default=2, help="major version")
    parser.add_argument("--points", type=points, default=(), help="where scale cases measure: 1,10")
    parser.add_argument("--json", type=Path, help="keep all values in this file, case by case")
    parser.add_argument("--markdown", action="store_true", help="Markdown on standard output")
    parser.add_argument("--plots", type=Path, help="write charts (SVG) into this folder")
    parser.add_argument("--results", type=Path, help="put tables between the marks of this file")
    parser.add_argument("--from", type=Path, dest="source", help="show what such a file has")
    options = parser.parse_args(words)
    unknown = set(options.case) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list names them")
    if not (options.list or options.all or options.case or options.source):
        parser.error("name a case, or say --all or --list")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


class Output:
    """Where results go: each as soon as it is there, so that a run cut short keeps what it has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=160)
        self._header = ""
        self._said: list[str] = []
        self.kept: dict[str, Any] = {"cases": {}}
        if options.json and options.json.exists():
            self.kept = read_document(options.json)

    def result(self, case: Case, result: Result, about: dict[str, Any]) -> None:
        """Print one result, and draw its charts; ``about``: ``machine`` and ``rounds``."""
        options = self._options
        if options.markdown or options.results:
            header = machine_line(about["machine"])
            if header != self._header:
                self._say(f"{header}\n")
                self._header = header
            plots = options.plots.name if options.plots else ""
            self._say(markdown(case, result, about["rounds"], plots))
        else:
            show(case, result, self._console)
        if options.plots:
            write_charts(case, result, options.plots)

    def _say(self, text: str) -> None:
        self._said.append(text)
        if self._options.results:
            put_between_marks(self._options.results, "\n".join(self._said))
        else:
            print(text, flush=True)

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        """Put one case into the JSON file, in place of what it had of that case."""
        self.kept["cases"][name] = entry
        if self._options.json:
            part = self._options.json.with_suffix(".part")
            part.write_text(json.dumps(self.kept, indent=1) + "\n", encoding="utf-8")
            part.replace(self._options.json)


def run_cases(chosen: list[Case], options: argparse.Namespace) -> bool:
    """Run them one after the other; False if one failed, which does not keep others from it."""
    settings = Settings(
        rounds=1 if options.quick else options.rounds,
        quick=options.quick,
        rate_mbit=options.rate,
        delay_ms=options.delay_ms,
        containerd=options.containerd,
        points=options.points,
    )
    say = Progress()
    output = Output(options)
    here = machine()
    went_well = True
    for case in chosen:
        say(f"{case.name}: {case.shows}")
        start = time.monotonic()
        about = {"machine": here, "quick": settings.quick, "rounds": settings.rounds}
        try:
            result = case.run(settings, say)
        except Exception as error:  # the other cases are still worth running
            if not isinstance(error, BedError | OSError):
                traceback.print_exc()
            say(f"{case.name} failed: {error}")
            output.keep(case.name, {**about, "failed": str(error)})
            went_well = False
            continue
        seconds = time.monotonic() - start
        say(f"{case.name}: done in {seconds:.0f} s")
        output.keep(case.name, {**about, **document(case, result, seconds)})
        output.result(case, result, about)
    return went_well


def show_kept(cases: dict[str, Case], options: argparse.Namespace) -> bool:
    """Print what a JSON file has, without measuring anything."""
    output = Output(options)
    kept = read_document(options.source)["cases"]
    for name in options.case or sorted(kept):
        if "failed" in kept.get(name, {"failed": True}) or name not in cases:
            continue
        output.result(cases[name], read_result(kept[name]), kept[name])
    return True


def list_cases(cases: dict[str, Case]) -> None:
    width = max(map(len, cases))
    for case in cases.values():
        large = " (large: only by name)" if case.large else ""
        print(f"{case.name:{width}}  {case.shows}{large}")
        print(f"{'':{width}}  target: {case.target}")


def ended(signal_number: int, _frame: object) -> None:
    """A signal ends a run the way an error does: with everything cleaned up, and undisturbed."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + signal_number)


def main() -> int:
    cases = all_cases()
    options = arguments(cases)
    if options.list:
        list_cases(cases)
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ended)
    if options.source:
        return 0 if show_kept(cases, options) else 1
    chosen = [cases[name] for name in options.case]
    if options.all:
        chosen = [case for case in cases.values() if not case.large]
    return 0 if run_cases(chosen, options) else 1


if __name__ == "__main__":
    sys.exit(main())
