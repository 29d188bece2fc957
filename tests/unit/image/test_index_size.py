"""An index is as small as is promised, of a layer such as people have."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from snapshotter.image.indexer import IndexLimits
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import TarLayerScanner
from snapshotter.image.windows import WINDOWS_SUFFIX
from tests.unit.image.layers import index_of, member, tar

SOURCE_BYTES = 12_000_000


def _sources() -> list[tuple[str, bytes]]:
    """Python's own library, as it lies on any machine that runs this, some times over."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) * 4
    files: list[tuple[str, bytes]] = []
    total = 0
    for number, path in enumerate(found):
        if total < SOURCE_BYTES:
            files.append((f"lib/python3/{number // 50}/{path.name}", path.read_bytes()))
            total += len(files[-1][1])
    return files


@pytest.mark.parametrize("level", [1, 9])
def test_a_mount_needs_a_thousandth_and_windows_one_and_a_half_percent(
    tmp_path: Path, level: int
) -> None:
    files = _sources()
    plain = tar(files)
    scanner = TarLayerScanner(ScanLimits())
    index = index_of(member(plain, level), plain, tmp_path, limits=IndexLimits(), scanner=scanner)
    assert index.entry_count >= len(files) > 100
    assert len(index.data) <= 0.001 * len(plain) + 110 * index.entry_count
    windows = next(tmp_path.glob(f"*{WINDOWS_SUFFIX}")).stat().st_size
    assert 0 < windows == index.windows_bytes <= 0.015 * len(plain)
