"""One record, file or directory that nobody expected never costs the node its daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.images import ImageCase
from tests.containers import layer_mounts, reading_image
from tests.node import Node, node
from tests.readers import lazily

pytestmark = [pytest.mark.root, pytest.mark.containerd]


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def indexed(at: Node, name: str) -> ImageCase:
    """An image that is indexed, of which nothing is here."""
    case = reading_image(b"\x7fELF", name)
    lazily(at, case)
    return case


def content(case: ImageCase, root: Path) -> list[int]:
    return [len((root / name).read_bytes()) for name in case.rows]


def test_foreign_things_and_bad_records_are_passed_over(at: Node) -> None:
    case = indexed(at, "junk")
    layers, root = at.ember.state / "layers", at.ember.root
    with at.mounted(case.chain_id) as running:
        at.ember.stop()
        records = sorted(layers.glob("*.json"))
        for record, junk in zip(records, ("", '{"key": 1}'), strict=True):
            record.write_text(junk)
        for place in (layers, root / "staging", root / "presence", root / "views", root / "index"):
            (place / "foreign" / "thing").mkdir(parents=True)
            (place / "foreign.json").mkdir()
            (place / "file").write_text("foreign")
        (root / "views" / "another" / "thing").mkdir(parents=True)
        os.mkfifo(root / "views" / "pipe")
        at.start_again()
        assert content(case, running)
        with at.mounted(case.chain_id) as again:
            assert content(case, again) == content(case, running)
    assert at.image(case.reference)["here_bytes"]
    assert len(layer_mounts(at)) == len(records)
    assert not at.drop(case.reference).kept
    assert "Traceback" not in at.ember.log()


def test_an_index_that_is_no_file_spoils_nothing_but_itself(at: Node) -> None:
    case = indexed(at, "noindex")
    at.ember.stop()
    for index in (at.ember.root / "index").glob("*.idx"):
        index.unlink()
        (index / "inside").mkdir(parents=True)
    at.start_again()
    assert at.image(case.reference)["plain_bytes"] == 0
    with at.mounted(case.chain_id) as root:
        assert content(case, root)
    assert at.image(case.reference)["plain_bytes"]
    assert "Traceback" not in at.ember.log()
