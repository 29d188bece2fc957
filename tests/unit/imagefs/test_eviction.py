"""Eviction: the oldest data that nothing stands on, and no more of it than is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotter.content import Digest
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.eviction import Evictor
from tests.unit.imagefs.parts import layer

OLD, SHARED, NEW = layer("old"), layer("shared"), layer("new")


@dataclass
class Node:
    """Catalog, views and remover in one: three layers of 100 bytes each, in two images."""

    standing: set[str] = field(default_factory=set)
    busy: set[Digest] = field(default_factory=set)
    in_use: set[Digest] = field(default_factory=set)
    evicted: list[Layer] = field(default_factory=list)

    def images(self) -> list[Any]:
        newer = SimpleNamespace(seen_ns=2, layers=(SHARED, NEW))
        older = SimpleNamespace(seen_ns=1, layers=(OLD, SHARED))
        return [newer, older]

    def layers_of_view(self, view: Digest) -> list[Digest]:
        return [one.blob for one in (OLD, SHARED, NEW) if one.diff_id == view]

    def is_busy(self, view: Digest) -> bool:
        return view in self.busy

    def bytes_on_disk(self, view: Digest) -> int:
        return 0 if any(one.diff_id == view for one in self.evicted) else 100

    async def evict(self, one: Layer) -> int:
        if one.diff_id in self.in_use:
            return 0
        self.evicted.append(one)
        return 100

    async def stand(self) -> set[str]:
        return self.standing


async def evict(node: Node, length: int) -> int:
    parts: Any = node
    return await Evictor(parts, parts, parts, node.stand).evict(length)


async def test_the_oldest_goes_first_and_no_more_than_is_needed() -> None:
    node = Node()
    assert await evict(node, 1) == 100
    assert node.evicted == [OLD]
    assert await evict(node, 150) == 200
    assert node.evicted == [OLD, SHARED, NEW]
    assert await evict(node, 1) == 0


@pytest.mark.parametrize("reason", ["standing", "busy", "in_use"])
async def test_what_is_used_stays(reason: str) -> None:
    node = Node()
    if reason == "standing":
        node.standing.add(str(OLD.blob))
    else:
        getattr(node, reason).add(OLD.diff_id)
    assert await evict(node, 1000) == 200
    assert node.evicted == [SHARED, NEW]
