"""The documents cannot rot: what they call exists, what they configure is accepted, and the pages
name every key that is printed."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from snapshotter.cli.checks.containerd_config import load
from snapshotter.config import parse
from tests.documents import DOCUMENTS, ROOT, calls, shell_lines, snippet, snippets
from tests.fakes.daemon import LAZY, STATUS, FakeOperations
from tests.unit.cli.conftest import Place

PAGES = [path.stem for path in sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDERS = {"IMAGE": "app", "COMMAND": "pull"}
ROWS = re.compile(r"^\| (`.*?) \|", re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_that_a_page_calls_can_be_called(
    path: Path, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what is made, is made there
    for call in calls(path):
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(re.sub(r"[\[\]&]", "", call))]
        if words[1] == "serve":
            words.append("--check")  # it would stay
        if "--install-completion" in words:
            continue  # it would write into the home directory
        result = place.ember(*words[1:])
        given = words[3:] if words[1] == "index" else words[2:]
        named_only = all(word.startswith("-") for word in given)
        if named_only and ("Missing argument" in result.stderr or "COMMAND [" in result.output):
            continue
        assert result.exit_code in (0, 1, 3), (call, result.stderr)


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_of_ours_is_accepted_and_of_containerd_is_understood(
    page: str, tmp_path: Path
) -> None:
    for each in snippets(page):
        if each.kind != "toml":
            continue
        assert tomllib.loads(each.text), each
        if "proxy_plugins" in each.text:
            version = 3 if "version = 3" in each.before else 2
            file = tmp_path / "config.toml"
            file.write_text(f"version = {version}\n{each.text}")
            config = load(file)
            assert config.cri["snapshotter"] == "ember"
            assert config.proxies["ember"]["address"] == str(parse("", "x").socket)
            assert config.ignored == []
        elif "hosts.toml" not in each.before:
            assert parse(each.text, f"docs/{page}.md")


def test_the_install_page_has_what_the_doctor_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"version = 3\n{snippet('install', 'containerd 2.x')}")
    config = load(file)
    assert config.unpacks_into == ["ember", "overlayfs"]
    exports = config.proxies["ember"]["exports"]
    assert exports["enable_remote_snapshot_annotations"] == "true"
    assert exports["root"] == str(parse("", "x").root)
    file.write_text(f"version = 2\n{snippet('install', 'containerd 1.6 and 1.7')}")
    assert load(file).cri["disable_snapshot_annotations"] is False


def test_the_files_that_the_install_page_names_are_there() -> None:
    lines = shell_lines(ROOT / "docs" / "install.md")
    (copied,) = [line.split()[1] for line in lines if line.startswith("cp ")]
    unit = (ROOT / copied).read_text(encoding="utf-8")
    (linked,) = [line.split()[-1] for line in lines if line.startswith("ln -s") and "bin" in line]
    assert f"ExecStart={linked} serve\n" in unit
    packages = next(line for line in lines if line.startswith("apt-get install")).split()[2:]
    needed = (ROOT / "tests" / "tools" / "install-packages").read_text(encoding="utf-8")
    assert set(packages) <= set(needed.split())


def test_the_shells_that_complete_are_the_ones_of_the_page(place: Place) -> None:
    lines = shell_lines(ROOT / "docs" / "commands.md")
    variables = [line.split()[0] for line in lines if "_COMPLETE=" in line]
    assert variables == [f"_EMBER_COMPLETE=source_{name}" for name in ("bash", "zsh", "fish")]


def documented(heading: str) -> set[str]:
    """The names in the first column of the table below ``heading``."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    part = page.split(f"### {heading}\n", 1)[1].split("\n### ", 1)[0]
    return {name for row in ROWS.findall(part) for name in re.findall(r"`([^`]+)`", row)}


def keys(document: Any, *, leaves: set[str]) -> set[str]:
    """``a.b`` and ``a[].b`` for all that is in it; what is in ``leaves`` is not looked into."""
    found = set()
    for key, value in document.items():
        inner = value[0] if isinstance(value, list) and value else value
        dots = f"{key}[]." if isinstance(value, list) else f"{key}."
        if key in leaves or not isinstance(inner, dict):
            found.add(key)
        else:
            found |= {dots + name for name in keys(inner, leaves=leaves)}
    return found


def test_every_key_of_the_status_is_documented() -> None:
    leaves = {"images", "guard", "tiers", "notes"}
    assert documented("`ember status --json`") == keys(STATUS, leaves=leaves)
    assert documented("`ember images --json`") == keys(LAZY, leaves={"tiers"})


def test_every_key_of_the_other_commands_is_documented(
    place: Place, served: FakeOperations
) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for words in (["pull", "app"], ["warm", "app"], ["rm", "app"], ["drain"], ["doctor"]):
        printed = json.loads(place.ember(*words, "--json").stdout)
        row = next(r for r in page.splitlines() if r.startswith(f"| `ember {words[0]} --json`"))
        first = printed[0] if isinstance(printed, list) else printed
        assert set(re.findall(r"`(\w+)`", row)) - {"ok", "warn", "fail"} == set(first)
