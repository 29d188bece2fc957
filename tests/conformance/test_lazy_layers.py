"""What must hold of every provider of lazy layers, as the snapshotter relies on it.

A provider joins by adding its stage to ``STAGES``: a place where it has one layer that can be
served lazily, one that can't, and a switch that holds its bytes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from snapshotter.errors import UnavailableError
from snapshotter.snapshots import labels as known
from snapshotter.snapshots.claims import layer_claim
from snapshotter.snapshots.lazy import LayerClaim, LazyLayer, LazyLayers, StackEntry
from tests.conformance.layers_stage import real_stage
from tests.fakes.lazy import FakeLazyLayers, digest

LATE_S = 5.0


class Stage(Protocol):
    """``lazy_claim`` and ``plain_claim`` are claims that are taken, and not; ``shown`` are the
    files of the lazy layer."""

    lazy: LazyLayers
    lazy_claim: LayerClaim
    plain_claim: LayerClaim
    shown: dict[str, bytes]

    def hold_back(self, held: bool) -> None:
        """Until it is called with False, the lazy layer cannot become readable."""
        ...


class FakeStage:
    def __init__(self) -> None:
        self.fake = FakeLazyLayers()
        self.fake.taken = {"sha256:lazy"}
        self.lazy: LazyLayers = self.fake
        self.lazy_claim = _claim("sha256:lazy")
        self.plain_claim = _claim("sha256:plain")
        self.shown: dict[str, bytes] = {}

    def hold_back(self, held: bool) -> None:
        self.fake.ready = not held


def _claim(chain_id: str) -> LayerClaim:
    labels = {
        known.SNAPSHOT_REF: chain_id,
        known.IMAGE_REF: "registry.example/app:1",
        known.LAYER_DIGEST: str(digest(chain_id)),
    }
    return layer_claim("default", chain_id, "", labels, (), False)


@asynccontextmanager
async def fake_stage(_: Path) -> AsyncIterator[Stage]:
    yield FakeStage()


STAGES: dict[str, Callable[[Path], AbstractAsyncContextManager[Stage]]] = {
    "fake": fake_stage,
    "real": real_stage,
}


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.root)])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    async with STAGES[request.param](tmp_path) as built:
        yield built


def entry(root: Path, number: int, claim: LayerClaim, layer: LazyLayer | None) -> StackEntry:
    """The snapshot's directory is there; a plain one has its files, a lazy one nothing yet."""
    directory = root / "snapshots" / str(number) / "fs"
    directory.parent.mkdir(parents=True, exist_ok=True)
    if layer is None:
        directory.mkdir()
        return StackEntry(number, f"name {number}", directory, None, claim.chain_id)
    return StackEntry(number, claim.chain_id, directory, layer.layer, claim.chain_id, layer.view)


def shown(entry: StackEntry) -> dict[str, bytes]:
    """The files that somebody sees who follows the link."""
    return {path.name: path.read_bytes() for path in entry.directory.iterdir()}


async def taken(stage: Stage) -> LazyLayer:
    layer = await stage.lazy.claim(stage.lazy_claim)
    assert layer is not None
    return layer


async def test_a_layer_is_taken_the_same_way_each_time_and_another_is_not(stage: Stage) -> None:
    first, second = await taken(stage), await taken(stage)
    assert first == second
    assert await stage.lazy.claim(stage.plain_claim) is None


async def test_mounting_makes_lazy_directories_readable_and_leaves_plain_ones(
    stage: Stage, tmp_path: Path
) -> None:
    plain = entry(tmp_path, 1, stage.plain_claim, None)
    (plain.directory / "file").write_text("as it was")
    lazy = entry(tmp_path, 2, stage.lazy_claim, await taken(stage))
    for _ in range(2):
        await stage.lazy.mount((plain, lazy), LATE_S)
        assert lazy.directory.is_dir()
        assert shown(lazy) == stage.shown
        assert (plain.directory / "file").read_text() == "as it was"
    usage = await stage.lazy.usage(lazy)
    assert usage.size_bytes >= 0
    assert usage.inodes >= 0
    await stage.lazy.release(lazy)


async def test_a_layer_that_is_not_ready_is_unavailable_in_time_and_shows_nothing(
    stage: Stage, tmp_path: Path
) -> None:
    stage.hold_back(True)
    lazy = entry(tmp_path, 1, stage.lazy_claim, await taken(stage))
    async with asyncio.timeout(LATE_S):
        with pytest.raises(UnavailableError):
            await stage.lazy.mount((lazy,), 0.05)
    assert not lazy.directory.exists()
    stage.hold_back(False)
    await stage.lazy.mount((lazy,), LATE_S)
    assert shown(lazy) == stage.shown
    await stage.lazy.release(lazy)


async def test_releasing_is_quick_and_may_be_repeated_also_of_what_was_never_mounted(
    stage: Stage, tmp_path: Path
) -> None:
    lazy = entry(tmp_path, 1, stage.lazy_claim, await taken(stage))
    async with asyncio.timeout(LATE_S):
        await stage.lazy.release(lazy)
        await stage.lazy.mount((lazy,), LATE_S)
        await stage.lazy.release(lazy)
        await stage.lazy.release(lazy)
    assert await stage.lazy.claim(stage.lazy_claim) is not None


async def test_a_layer_of_two_snapshots_stays_until_both_are_released(
    stage: Stage, tmp_path: Path
) -> None:
    layer = await taken(stage)
    first, second = (entry(tmp_path, number, stage.lazy_claim, layer) for number in (1, 2))
    await asyncio.gather(*(stage.lazy.mount((each,), LATE_S) for each in (first, second)))
    await stage.lazy.release(first)
    assert shown(second) == stage.shown
    await stage.lazy.release(second)
    await stage.lazy.mount((first,), LATE_S)
    assert shown(first) == stage.shown
    await stage.lazy.release(first)


async def test_a_mount_that_is_hung_up_on_leaves_nothing_that_a_release_does_not_undo(
    stage: Stage, tmp_path: Path
) -> None:
    lazy = entry(tmp_path, 1, stage.lazy_claim, await taken(stage))
    hung_up = asyncio.create_task(stage.lazy.mount((lazy,), LATE_S))
    await asyncio.sleep(0)
    hung_up.cancel()
    await asyncio.gather(hung_up, return_exceptions=True)
    await stage.lazy.mount((lazy,), LATE_S)
    assert shown(lazy) == stage.shown
    await stage.lazy.release(lazy)
