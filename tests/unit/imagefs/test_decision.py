"""One decision for all layers of an image: what makes it lazy, and the reason when it is not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.content import BlobRef
from snapshotter.errors import EmberError, NotFoundError, UnauthorizedError, UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.catalog import PIECE, Catalog, Layer
from snapshotter.imagefs.decision import NO_LABELS, Decider, ImageDocument, Policy
from snapshotter.imagefs.pulls import HOLDS_S
from snapshotter.imagefs.shelf import Shelf
from snapshotter.snapshots.database import Database
from tests.fakes.hand_clock import HandClock
from tests.fakes.lazy import digest
from tests.unit.imagefs.parts import (
    Documents,
    Later,
    Origin,
    Others,
    Streams,
    claim,
    document,
    layer,
)

LAYERS = (layer("one"), layer("two"))
BIG = (layer("low"), layer("mid"), layer("top"))


class Scene:
    """A decider over parts in memory; nothing is indexed."""

    def __init__(self, database: Database, directory: Path, policy: Policy) -> None:
        self.catalog = Catalog(database)
        self.documents = Documents(document(*LAYERS))
        self.origin = Origin()
        self.streams = Streams()
        self.others = Others()
        self.later = Later()
        self.clock = HandClock()
        self.decider = Decider(
            policy,
            self.catalog,
            Shelf(directory, self.catalog.layers_of_view, self.catalog.origins),
            self.documents,
            self.origin,
            self.streams,
            self.others,
            self._complete,
            self.later.want,
            self.clock,
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
    database: Database, tmp_path: Path, error: EmberError, reason: str
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.origin.error = error
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

    scene.origin.answers.clear()
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


async def test_a_layer_is_asked_for_in_the_images_own_repository_once(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    for _ in range(2):
        assert (await scene.decider.decide(claim(LAYERS[0]))).lazy
        scene.decider.forget(digest("manifest"))
    assert [(ref.repository, ref.digest) for ref in scene.origin.given] == [
        ("registry.example/app", layer.blob) for layer in LAYERS
    ]
    assert [ref.repository for ref in scene.catalog.origins(LAYERS[1].blob)] == [
        "registry.example/app"
    ]


async def test_a_layer_that_its_repository_does_not_give_makes_no_origin_of_it(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.origin.refused = {LAYERS[1].blob: NotFoundError(f"{LAYERS[1].blob}: 404")}
    for _ in range(2):  # what was refused once is not let in the second time
        decision = await scene.decider.decide(claim(LAYERS[0]))
        assert not decision.lazy
        assert f"out of Ember's reach: {LAYERS[1].blob}" in decision.reason
    assert scene.streams.started == []
    assert scene.catalog.origins(LAYERS[1].blob) == []


async def test_what_one_repository_was_told_holds_for_no_other(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    assert (await scene.decider.decide(claim(LAYERS[0]))).lazy
    scene.origin.error = UnauthorizedError("401")
    other = replace(claim(LAYERS[0]), image_ref="registry.example/copy:1")
    assert not (await scene.decider.decide(other)).lazy


async def test_a_yes_holds_for_the_moments_that_a_lazy_pull_takes(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    one, two = LAYERS
    assert (await scene.decider.decide(claim(one))).lazy
    assert (await scene.decider.decide(claim(two, on=one))).lazy
    assert scene.documents.asked == 1
    await scene.clock.advance(HOLDS_S)  # another pull: is it still let in?
    scene.origin.error = UnauthorizedError("401")
    assert not (await scene.decider.decide(claim(one))).lazy


async def too_big_as_yet(database: Database, directory: Path) -> Scene:
    """Of an image of three layers the lowest was left to containerd; from now on all would do."""
    scene = Scene(database, directory, policy("auto", budget_s=10))
    scene.documents.answer = document(*BIG)
    scene.streams.per_second = 1.0
    assert not (await scene.decider.decide(claim(BIG[0]))).lazy
    scene.streams.per_second = 1e9
    return scene


async def test_a_no_holds_for_the_whole_pull_however_long_that_takes(
    database: Database, tmp_path: Path
) -> None:
    scene = await too_big_as_yet(database, tmp_path)
    for below, above in itertools.pairwise(BIG):
        await scene.clock.advance(3600)
        assert not (await scene.decider.decide(claim(above, on=below))).lazy
    assert scene.documents.asked == 1


async def test_who_comes_to_a_pull_that_goes_on_gets_its_no(
    database: Database, tmp_path: Path
) -> None:
    scene = await too_big_as_yet(database, tmp_path)
    for _ in range(20):
        await scene.clock.advance(HOLDS_S / 10)
        assert not (await scene.decider.decide(claim(BIG[0], being_unpacked=True))).lazy
    assert scene.documents.asked == 1
    await scene.clock.advance(HOLDS_S)  # it may as well be the leftover of a pull that failed
    assert (await scene.decider.decide(claim(BIG[0], being_unpacked=True))).lazy


@pytest.mark.parametrize("ended_at", range(3))
async def test_the_next_pull_is_decided_on_anew(
    database: Database, tmp_path: Path, ended_at: int
) -> None:
    scene = await too_big_as_yet(database, tmp_path)
    for below, above in itertools.pairwise(BIG[: ended_at + 1]):
        await scene.decider.decide(claim(above, on=below))
    # The layer where it ended, or the whole image, is gone: nobody is unpacking it.
    on = BIG[ended_at - 1] if ended_at else None
    assert (await scene.decider.decide(claim(BIG[ended_at], on=on))).lazy


async def test_layers_of_another_image_below_say_nothing_of_this_one(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    base = layer("unpacked once for another image")
    scene.documents.answer = document(base, *LAYERS)
    assert (await scene.decider.decide(claim(LAYERS[0], on=base))).lazy


async def test_indexes_from_elsewhere_are_looked_for_only_where_none_is_here_or_made(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.streams.start(BlobRef("registry.example/app", LAYERS[0].blob, 1), LAYERS[0].diff_id)
    assert (await scene.decider.decide(claim(LAYERS[0]))).lazy
    assert scene.others.asked == [LAYERS[1]]


async def test_a_lookup_that_hangs_leaves_the_decision_its_time(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.others.answers.clear()
    async with asyncio.timeout(5):
        decision = await scene.decider.decide(claim(LAYERS[0]))
    assert decision.lazy
    assert len(scene.streams.started) == 2


async def test_what_is_here_by_an_index_that_does_not_count_goes_before_it_is_built_anew(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.others.doubts = {LAYERS[1]: "its key is gone"}
    assert (await scene.decider.decide(claim(LAYERS[0]))).lazy
    assert scene.others.discarded == [LAYERS[1]]
    assert [ref.digest for ref in scene.streams.started] == [layer.blob for layer in LAYERS]


async def test_what_cannot_go_makes_the_image_overlay_and_says_why(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.others.doubts = {LAYERS[1]: "its key is gone"}
    scene.others.kept = "layer sha256:1: in use by a running container"
    decision = await scene.decider.decide(claim(LAYERS[0]))
    assert (decision.lazy, decision.reason) == (False, scene.others.kept)
    assert scene.streams.started == []


async def test_whoever_may_not_read_an_image_has_nothing_taken_away_by_its_name(
    database: Database, tmp_path: Path
) -> None:
    scene = Scene(database, tmp_path, policy())
    scene.others.doubts = {LAYERS[1]: "it came unsigned from another repository"}
    scene.origin.refused = {LAYERS[0].blob: UnauthorizedError("401")}
    assert not (await scene.decider.decide(claim(LAYERS[0]))).lazy
    assert scene.others.discarded == []


async def test_what_comes_by_another_image_during_the_decision_counts_no_more_than_before_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(database, tmp_path, policy())

    async def look(document: ImageDocument, wanted: Sequence[Layer]) -> str:
        scene.others.doubts = {LAYERS[1]: "it came unsigned from another repository"}
        return "there is none"

    monkeypatch.setattr(scene.others, "look", look)
    assert (await scene.decider.decide(claim(LAYERS[0]))).lazy
    assert scene.others.discarded == [LAYERS[1]]
