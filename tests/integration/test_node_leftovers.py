"""What a daemon that died left half done, and what nobody but root may reach."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.containers import layer_mounts, reading_image
from tests.node import Node, node

pytestmark = [pytest.mark.root, pytest.mark.containerd]

NOBODY = 65534


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def pulled(at: Node, name: str) -> str:
    case = reading_image(b"\x7fELF", name)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    return case.chain_id


def test_a_layer_whose_removal_a_crash_cut_short_is_unmounted_by_the_next_daemon(
    at: Node,
) -> None:
    pulled(at, "cutshort")
    left = layer_mounts(at)
    assert left
    at.ember.kill()
    with closing(sqlite3.connect(at.ember.root / "ember.db")) as database:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("DELETE FROM snapshots")
        database.commit()
    at.ember.start()
    at.connect()
    assert layer_mounts(at) == []
    assert not list((at.ember.state / "layers").iterdir())


def test_no_local_user_reaches_the_files_of_an_image(at: Node) -> None:
    pulled(at, "private")
    targets = [*layer_mounts(at), at.ember.state / "guarded", *at.ember.root.iterdir()]
    assert len(targets) > 5
    for parent in {*at.ember.root.parents, *at.ember.state.parents} - {Path("/")}:
        parent.chmod(parent.stat().st_mode | 0o111)
    for target in targets:
        if target.is_dir():
            found = subprocess.run(["ls", target], user=NOBODY, capture_output=True, check=False)
            assert found.returncode != 0, target
    assert os.access(targets[0], os.R_OK)
