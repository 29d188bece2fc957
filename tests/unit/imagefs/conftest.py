"""A node that looks for indexes, and an image that another node has indexed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.imagefs.others import Elsewhere, Looking


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, pool: ThreadPoolExecutor) -> Looking:
    return Looking(tmp_path / "node", pool)


@pytest.fixture
def image(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path / "elsewhere")
