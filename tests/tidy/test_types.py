"""Types: mypy reads every Python file, tests too, so that one that lags behind is seen at once.

That it finds nothing is the lint's to say; here is held what it looks at.
"""

from __future__ import annotations

import tomllib

from tests.tidy.sources import ROOT, python_sources

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def test_every_python_file_is_checked_strictly() -> None:
    assert SETTINGS["strict"]
    places: list[str] = SETTINGS["files"]
    covered = tuple(place if place.endswith(".py") else f"{place}/" for place in places)
    assert [s.name for s in python_sources() if not s.name.startswith(covered)] == []


def test_only_what_is_generated_is_left_out() -> None:
    assert SETTINGS["exclude"] == ["snapshotter/rpc/pb/"]
