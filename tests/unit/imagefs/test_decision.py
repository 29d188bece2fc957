"""One decision for all layers of an image: what makes it lazy, and the reason when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.clock import SystemClock
from snapshotter.errors import NotFoundError, UnauthorizedError, UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import PIECE, Catalog
from snapshotter.imagefs.decision import NO_LABELS, Decider, Policy
from snapshotter.imagefs.shelf import Shelf
from snapshotter.snapshots.database import Database
from tests.fakes.lazy import digest
from tests.unit.imagefs.parts import Documents, Later, Origin, Streams, claim, document, layer

LAYERS = (layer("one"), layer("two"))


class Scene:
    """A decider over parts in memory; nothing is indexed."""

    def __init__(self, database: Database, directory: Path, policy: Policy) -> None:
        self.catalog = Catalog(database)
        self.documents = Documents(document(*LAYERS))
        self.origin = Origin()
        self.streams = Streams()
        self.later = Later()
        self.decider = Decider(
            policy,
            self.catalog,
            Shelf(directory, self.catalog.layers_of_view, self.catalog.origins),
            self.documents,
            self.origin,
            self.streams,
            self._complete,
            self.later.want,
            SystemClock(),
        )

    async def _complete(self, index: LayerIndex) -> bool:
        raise AssertionError(f"no index is here, and {index.layer} is asked for")


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "ember.db", (PIECE,))
    yield opened
    await opened.close()


def policy(mode: str = "stream", *, budget_s: float = 60, no_path: str | None = None) -> Policy:
    return Policy(mode, budget_s, 0.2, no_path)


async def test_all_layers_are_streamed_when_none_has_an_index(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert decision.lazy
    assert [ref.digest for ref in scene.streams.started] == [layer.blob for layer in LAYERS]
    image = scene.catalog.image(digest("manifest"))
    assert image is not None
    assert image.lazy


async def test_twenty_clients_share_one_decision(database: Database, tmp_path: Path) -> None:
    scene = Scene(database, tmp_path, policy())
    claims = [claim(LAYERS[n % 2]) for n in range(20)]
    decisions = await asyncio.gather(*(scene.decider.decide(each) for each in claims))
    assert {decision.lazy for decision in decisions} == {True}
    assert scene.documents.asked == 1
    assert scene.origin.asked == 1
    assert len(scene.streams.started) == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnauthorizedError("401"), "no credentials"),
        (UnavailableError("refused"), "out of Ember's reach"),
        (NotFoundError("gone"), "out of Ember's reach"),
    ],
)
async def test_an_origin_that_cannot_be_read_makes_the_image_overlay(
    database: Database, tmp_path: Path, error: Exception, reason: str
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.origin.error = error  # type: ignore[assignment]
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert not decision.lazy
    assert reason in decision.reason
    assert scene.streams.started == []
    image = scene.catalog.image(digest("manifest"))
    assert image is not None
    assert image.reason == decision.reason


async def test_an_origin_that_hangs_costs_only_the_time_that_a_decision_may_take(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())

    async def hang(reference: str, manifest: object) -> None:
        await asyncio.Event().wait()

    scene.origin.check = hang  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        decision = await scene.decider.decide(claim(LAYERS[0]))
    assert "did not answer within 0.2 s" in decision.reason


async def test_a_claim_without_labels_says_how_to_get_them(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    decision = await scene.decider.decide(claim(LAYERS[0], labelled=False))
    assert decision.reason == NO_LABELS
    assert scene.decider.unlabelled == 1


async def test_a_kernel_without_a_lazy_path_is_the_first_reason(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy(no_path="Linux 6.1 is too old"))
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert decision.reason == "Linux 6.1 is too old"
    assert scene.origin.asked == 0
    image = scene.catalog.image(digest("manifest"))
    assert image is not None
    assert image.reason == "Linux 6.1 is too old"


async def test_auto_streams_what_fits_the_budget_and_leaves_the_rest_to_containerd(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy("auto", budget_s=10))
    big = layer("big", 11_000_000)
    scene.documents.answer = document(LAYERS[0], big)
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert not decision.lazy
    assert "would take 11 s" in decision.reason
    assert scene.later.wanted == [LAYERS[0], big]
    assert scene.streams.started == []


async def test_overlay_mode_never_streams_and_indexes_later(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy("overlay"))
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert 'first_pull.mode = "overlay"' in decision.reason
    assert scene.later.wanted == list(LAYERS)


async def test_an_image_with_a_refused_layer_is_left_to_containerd_by_name(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    await scene.catalog.blame(LAYERS[1].blob, LAYERS[1].diff_id, "tar: '../x' leaves the root", 1)
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert str(LAYERS[1].blob) in decision.reason
    assert "leaves the root" in decision.reason


async def test_documents_that_cannot_be_read_are_a_reason_and_no_error(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.documents.answer = UnavailableError("containerd is gone")
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert not decision.lazy
    assert "containerd is gone" in decision.reason
    image = scene.catalog.image(digest("manifest"))
    assert image is not None
    assert image.reason == decision.reason


async def test_a_decision_is_forgotten_on_demand(database: Database, tmp_path: Path) -> None:
    scene = Scene(database, tmp_path, policy())
    await scene.decider.decide(claim(LAYERS[0]))
    scene.decider.forget(digest("manifest"))
    await scene.decider.decide(claim(LAYERS[0]))
    assert scene.documents.asked == 2
