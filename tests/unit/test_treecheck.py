"""The reusable check itself: it must see every difference, and only the agreed ones not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.treecheck import (
    CONTAINERD_DEPARTURES,
    Row,
    Rows,
    clamped_times,
    compare,
    load_truth,
    walk,
)


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"content")
    os.link(tmp_path / "d/f", tmp_path / "a")
    (tmp_path / "link").symlink_to("d/")
    os.mkfifo(tmp_path / "pipe")
    return walk(tmp_path)


def test_a_tree_equals_itself(rows: Rows) -> None:
    assert compare(rows, rows) == []
    assert set(rows) == {"d", "d/f", "a", "link", "pipe"}
    assert rows["a"].hardlink_of == ""
    assert rows["d/f"].hardlink_of == "a"
    assert rows["link"].size == 2


@pytest.mark.parametrize(
    "change",
    [
        {"type": "dir"}, {"mode": 0o777}, {"uid": 77}, {"gid": 77}, {"mtime_ns": 1}, {"size": 8},
        {"sha256": "0" * 64}, {"link": "x"}, {"rdev": (9, 9)}, {"xattrs": {"user.x": b""}},
        {"hardlink_of": ""},
    ],
)  # fmt: skip
def test_every_field_counts(rows: Rows, change: dict[str, Any]) -> None:
    other = dict(rows) | {"d/f": replace(rows["d/f"], **change)}
    assert len(compare(rows, other)) >= 1


def test_missing_and_unexpected_paths_are_told(rows: Rows) -> None:
    fewer = {path: row for path, row in rows.items() if path != "pipe"}
    assert compare(rows, fewer) == ["'pipe': not there"]
    assert compare(fewer, rows) == ["'pipe': fifo that nobody expected"]


def test_directories_between_expected_rows_may_be_left_out(rows: Rows) -> None:
    fewer = {path: row for path, row in rows.items() if path != "d"}
    assert compare(fewer, rows) != []
    assert compare(fewer, rows, ignore_unlisted_directories=True) == []


def test_a_group_of_hard_links_has_no_first_one() -> None:
    expected = {"a": Row("file", hardlink_of="b"), "b": Row("file", hardlink_of="")}
    actual = {"a": Row("file", hardlink_of=""), "b": Row("file", hardlink_of="a")}
    assert compare(expected, actual) == []


def test_departures_accept_what_they_name_and_nothing_else() -> None:
    expected = {"f": Row("file", mtime_ns=-5, mode=0o644)}
    assert compare(expected, {"f": Row("file", mtime_ns=0, mode=0o644)}, (clamped_times,)) == []
    assert compare(expected, {"f": Row("file", mtime_ns=1, mode=0o644)}, CONTAINERD_DEPARTURES)
    assert compare(expected, {"f": Row("file", mtime_ns=0, mode=0o600)}, CONTAINERD_DEPARTURES)


def test_a_written_truth_is_read(tmp_path: Path) -> None:
    path = tmp_path / "truth.json"
    path.write_text('{"n": {"type": "char", "mode": 438, "rdev": [1, 3], "xattrs": {"u": "dg=="}}}')
    assert load_truth(path) == {
        "n": Row("char", 438, rdev=(1, 3), xattrs={"u": b"v"}, hardlink_of="")
    }
