"""Run the stages of `make test`, two lanes side by side, and print one summary.

A stage is a command with a limit of time. What it says is kept in .cache/test-logs and shown only
where it failed, so that the last screen of a run says all: each stage's result and seconds, and
what was left out and why. Every stage runs, whatever became of the others; a stage that is still
running at the end of its time is ended with all of its children.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".cache" / "test-logs"
SHOWN_LINES = 120
LIVE: set[subprocess.Popen[bytes]] = set()
SKIPPED = re.compile(r"^SKIPPED \[\d+\].*$", re.MULTILINE)
PYTEST_END = re.compile(r"^=*\s*((?:\d+ [a-z]+,? ?)+ in [\d.]+s.*?)\s*=*$", re.MULTILINE)


@dataclass
class Stage:
    """One command of the run: ``lane`` 0 and 1 run side by side, lane 2 when both are done."""

    name: str
    lane: int
    limit_s: int
    command: list[str]
    result: str = "not run"
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"


def stages(venv: Path) -> list[Stage]:
    python = str(venv / "bin" / "python")
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    return [
        Stage("ruff", 0, 60, [python, "-m", "ruff", "check", "."]),
        Stage("format", 0, 60, [python, "-m", "ruff", "format", "--check", "-q", "."]),
        Stage("types", 0, 300, [python, "-m", "mypy"]),
        Stage("floors", 0, 120, [str(venv / "bin" / "lint-imports")]),
        Stage("tidy", 0, 120, [*tests, "tests/tidy"]),
        Stage("unit", 0, 600, [*tests, "tests/unit"]),
        Stage(
            "c",
            1,
            600,
            ["make", "-s", "-C", "tests/c", "warnings", "test", "asan", "ubsan"],
        ),
        Stage("containerd2", 1, 900, [python, "-m", "bench.bed.gobin"]),
        Stage("contracts", 1, 600, [*tests, "tests/conformance"]),
        Stage(
            "containerd-suite",
            1,
            600,
            ["tests/conformance/snapshots/run", str(venv)],
        ),
        Stage("integration", 2, 1080, [*tests, "tests/integration"]),
    ]


def run_stage(stage: Stage, environment: dict[str, str]) -> None:
    start = time.monotonic()
    with stage.log.open("wb") as log:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        LIVE.add(process)
        try:
            code = process.wait(stage.limit_s)
            stage.result = "ok" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            stage.result = f"FAILED (still running after {stage.limit_s} s)"
        finally:
            end_group(process)
            LIVE.discard(process)
    stage.seconds = time.monotonic() - start
    text = stage.log.read_text(errors="replace")
    ends = PYTEST_END.findall(text)
    stage.notes = [*ends[-1:], *SKIPPED.findall(text)]
    if stage.result == "ok" and "pytest" in stage.command and not ends:
        stage.result = "FAILED (no test ran)"
    print(f"{stage.name:24} {stage.result:10} {stage.seconds:6.1f} s", flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a stage left behind in its session: a leader that is gone leaves its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(0.5 if number == signal.SIGTERM else 0)
    process.wait()


def interrupted(number: int, _frame: object) -> None:
    """End every stage that runs: they have sessions of their own and do not see a Ctrl-C."""
    for process in list(LIVE):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(128 + number)


def run_lane(lane: list[Stage], environment: dict[str, str]) -> None:
    for stage in lane:
        run_stage(stage, environment)


def summary(run: list[Stage], seconds: float) -> int:
    failed = [stage for stage in run if stage.result != "ok"]
    for stage in failed:
        lines = stage.log.read_text(errors="replace").splitlines() if stage.log.exists() else []
        print(f"\n--- {stage.name}: {' '.join(stage.command)}")
        print("\n".join(lines[-SHOWN_LINES:]))
    print("\n=== summary")
    for stage in run:
        note = stage.notes[0] if stage.notes else ""
        print(f"{stage.name:24} {stage.result:10} {stage.seconds:6.1f} s  {note}")
    left_out = [note for stage in run for note in stage.notes if note.startswith("SKIPPED")]
    print("\n".join(left_out) or "skipped: nothing")
    verdict = f"{len(failed)} of {len(run)} stages failed" if failed else "all stages passed"
    print(f"{verdict} in {seconds:.0f} s; full output in {LOGS.relative_to(ROOT)}/")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("stage", nargs="*", help="only these stages")
    arguments = parser.parse_args()
    venv = Path.cwd() / arguments.venv  # not resolved: bin/python may be a link out of it
    run = stages(venv)
    unknown = set(arguments.stage) - {stage.name for stage in run}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    if arguments.stage:
        run = [stage for stage in run if stage.name in arguments.stage]
    LOGS.mkdir(parents=True, exist_ok=True)
    path = f"{venv / 'bin'}:{os.environ.get('PATH', '')}:/usr/local/go/bin:/usr/sbin:/sbin"
    environment = os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    start = time.monotonic()
    side_by_side = [
        threading.Thread(
            target=run_lane, args=([stage for stage in run if stage.lane == lane], environment)
        )
        for lane in (0, 1)
    ]
    for thread in side_by_side:
        thread.start()
    for thread in side_by_side:
        thread.join()
    run_lane([stage for stage in run if stage.lane == 2], environment)
    return summary(run, time.monotonic() - start)


if __name__ == "__main__":
    sys.exit(main())
