"""The command line: every case is found, says what is asked of it, and mistakes are named."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.__main__ import Output, all_cases, arguments, list_cases, run_cases, show_kept
from bench.bed.process import BedError
from bench.measure import Case, Figure, Result, Settings
from bench.progress import Progress

CASES = all_cases()


def measured(settings: Settings, say: Progress) -> Result:
    return Result([Figure("x", "s", 1.0, 2.0)], notes=[f"{settings.rounds} of {settings.points}"])


def broken(settings: Settings, say: Progress) -> Result:
    raise BedError("no root here")


SOME = {"good": Case("good", "works", measured), "bad": Case("bad", "does not", broken)}


def options(*words: str, cases: dict[str, Case] | None = None) -> argparse.Namespace:
    return arguments(SOME if cases is None else cases, list(words))


def test_every_case_is_found_by_the_name_of_its_module() -> None:
    folder = Path(__file__).parents[3] / "bench" / "cases"
    modules = {path.stem.replace("_", "-") for path in folder.glob("[a-z]*.py")}
    assert set(CASES) == modules


def test_every_case_says_what_it_shows_and_what_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    list_cases(CASES)
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in CASES)
    assert said.count("target: ") == len(CASES)
    assert all(case.shows and case.target for case in CASES.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other"], "no such case: other"),
        ([], "name a case"),
        (["good", "--points", "1,x"], "--points"),
        (["good", "--points", "0"], "numbers above 0"),
        (["good", "--rounds", "0"], "at least 1"),
    ],
)
def test_mistakes_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_case_that_fails_keeps_no_other_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.json"
    chosen = options("bad", "good", "--json", str(kept), "--markdown", "--points", "1,10")
    assert not run_cases([SOME["bad"], SOME["good"]], chosen)
    cases = json.loads(kept.read_text())["cases"]
    assert cases["bad"]["failed"] == "no root here"
    assert cases["good"]["figures"][0]["ratio"] == 0.5
    assert cases["good"]["machine"]["kernel"]
    assert "3 of (1.0, 10.0)" in capsys.readouterr().out


def test_a_second_run_replaces_its_own_cases_and_keeps_the_others(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    run_cases([SOME["good"]], options("good", "--json", str(kept), "--rounds", "7"))
    run_cases([SOME["bad"]], options("bad", "--json", str(kept)))
    cases = json.loads(kept.read_text())["cases"]
    assert cases["good"]["rounds"] == 7
    assert "failed" in cases["bad"]


def test_what_was_kept_is_shown_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.json"
    run_cases([SOME["good"], SOME["bad"]], options("good", "bad", "--json", str(kept)))
    capsys.readouterr()
    plots = tmp_path / "plots"
    assert show_kept(SOME, options("--from", str(kept), "--markdown", "--plots", str(plots)))
    said = capsys.readouterr().out
    assert said.startswith("Machine: Linux ") and "## good" in said and "## bad" not in said
    assert (plots / "good.svg").exists()


def test_a_quick_run_is_one_round_at_small_sizes() -> None:
    settings = Settings(quick=True)
    assert settings.steps((100, 10), (2, 1)) == [1, 2]
    assert Settings().steps((100, 10), (2, 1)) == [10, 100]
    assert Settings(quick=True, points=(5.0, 3.0)).steps((100, 10), (2, 1)) == [3, 5]


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("my notes")
    with pytest.raises(BedError, match="not a file of results"):
        Output(options("good", "--json", str(kept)))
    assert kept.read_text() == "my notes"
