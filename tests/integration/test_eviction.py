"""A full cache makes room by itself: what containerd has removed gives way to what is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers import reading_image
from tests.integration.test_full_disk import MIB, NO_BALLAST, small_node
from tests.treecheck import Rows

pytestmark = [pytest.mark.root, pytest.mark.containerd]


def test_a_pull_to_a_full_disk_takes_the_room_of_what_containerd_has_removed(
    tmp_path: Path,
) -> None:
    old, kept, new = (
        reading_image(b"\x7fELF", name, count=1, size=14 * MIB) for name in ("old", "kept", "new")
    )
    with small_node(tmp_path, NO_BALLAST) as (at, _):
        for case in (old, kept, new):
            case.push(at.bed.registry)
        for case in (old, kept):
            assert at.pull(case.reference).lazy_layers == 2
            at.shown(case.chain_id)
        at.containerd.ctr("images", "rm", "--sync", old.reference)
        at.containerd.collect_garbage()
        listing = ("snapshots", "--snapshotter", "ember", "ls")
        assert at.until(lambda: old.chain_id not in at.containerd.ctr(*listing))
        before = at.image(old.reference)
        assert before["here_bytes"] == before["plain_bytes"]
        assert at.pull(new.reference).lazy_layers == 2
        rows: Rows = at.shown(new.chain_id)
        assert {name: rows[name].sha256 for name in new.rows} == {
            name: row.sha256 for name, row in new.rows.items()
        }
        assert at.image(old.reference)["here_bytes"] == 0
        for case in (kept, new):
            image = at.image(case.reference)
            assert image["here_bytes"] == image["plain_bytes"]
        assert "evicted the data of layer" in at.ember.log()
        assert at.pull(old.reference).lazy_layers == 2  # its index is still here
