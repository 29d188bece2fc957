"""Every handmade layer, mounted by the kernel as EROFS over its tar and stacked by overlayfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.layers import LayerCase, in_one_layer
from tests.cases.stacks import of_several_layers
from tests.layerstack import mounted
from tests.treecheck import compare, directory_sizes, walk

CASES = [*in_one_layer(), *of_several_layers()]


@pytest.mark.root
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mounted_layer_shows_what_is_written_down(case: LayerCase, tmp_path: Path) -> None:
    with mounted(case.layers, tmp_path) as root:
        rows = walk(root)
    assert compare(case.rows, rows, (directory_sizes,)) == []
