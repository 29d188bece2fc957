"""Every handmade layer, scanned, written as EROFS, read back and merged in memory."""

from __future__ import annotations

import time

import pytest

from snapshotter.errors import RefusedError
from tests.cases.layers import in_one_layer
from tests.cases.refused import Refused, all_refused
from tests.cases.rows import LayerCase
from tests.cases.stacks import of_several_layers
from tests.layerstack import scan, shown
from tests.treecheck import compare, directory_sizes

CASES = [*in_one_layer(), *of_several_layers()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_shows_what_is_written_down(case: LayerCase) -> None:
    assert compare(case.rows, shown(case.layers), (directory_sizes,)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_split_of_the_stream_gives_the_same_tree(case: LayerCase) -> None:
    for plain in case.layers:
        if len(plain) > 1 << 20:
            continue
        whole = _flat(plain, len(plain) + 1)
        assert all(_flat(plain, step) == whole for step in (1, 511, 512, 1000))


def _flat(plain: bytes, step: int) -> list[object]:
    tree = scan(plain, step=step)
    return [
        (path, repr(inode), inode.mtime_ns, inode.segments, inode.xattrs, inode.target, inode.nlink)
        for path, inode in tree.walk()
    ]


@pytest.mark.parametrize("case", all_refused(), ids=lambda case: case.name)
def test_a_malformed_or_hostile_layer_is_refused_by_name_at_once(case: Refused) -> None:
    began = time.monotonic()
    with pytest.raises(RefusedError, match=case.word):
        scan(case.plain)
    assert time.monotonic() - began < 5
