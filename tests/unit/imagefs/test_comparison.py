"""Condemning a wrong index, cut off at every step: what it shows is never taken for sound."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from snapshotter.content import BlobRef, Digest
from snapshotter.imagefs.catalog import Catalog, Image, Layer
from snapshotter.imagefs.comparison import Comparison, Means
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.mounted import Mounted
from snapshotter.imagefs.provenance import Origin, Provenance
from snapshotter.imagefs.verdicts import Verdicts, Wrong
from snapshotter.oci.documents import digest_of
from tests.fakes.hand_clock import HandClock
from tests.indexes import with_set_uid
from tests.unit.imagefs.others import REPOSITORY, Elsewhere, Looking

STEPS = 4


class Killed(BaseException):
    """The daemon is no more."""


class Node:
    """All that a comparison stands on but the shelf; ``steps`` may be taken before it is killed."""

    def __init__(self, looking: Looking, image: Elsewhere, steps: int) -> None:
        self.looking, self.layer = looking, image.layers[0]
        self.steps, self.over = steps, asyncio.Event()
        self.view = looking.directory / "view"
        self.view.write_bytes(image.plains[self.layer.diff_id] + bytes(4096))
        target = looking.directory / "mounted"
        self.mounted = Mounted(
            self.layer.blob.hex, target, self.layer.blob, self.layer.diff_id, True
        )
        self.metadata, self.dropped = self, False

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            self.over.set()
            raise Killed

    def means(self) -> Means:
        known = cast(Any, self)
        return Means(
            self.looking.shelf,
            self.looking.trust,
            cast(Catalog, known),
            known,
            cast(Ingest, known),
            cast(LayerMounts, known),
            known,
            cast(Verdicts, known),
            self.blame,
            lambda verdict: None,
            HandClock(),
        )

    async def whole(self, view: Digest) -> bool:
        return True

    def path(self, view: Digest, *, guarded: bool) -> Path:
        return self.view

    def names_of_blob(self, blob: Digest) -> list[str]:
        return []

    def images_of_blob(self, blob: Digest) -> list[Image]:
        return []

    def origins(self, blob: Digest) -> list[BlobRef]:
        return [BlobRef(REPOSITORY, blob, self.layer.size_bytes)]

    async def condemn(self, wrong: object, seen_ns: int) -> None:
        self.step()

    async def blame(self, blob: Digest, view: Digest, reason: str) -> None:
        self.step()

    def instances(self) -> list[Mounted]:
        return [self.mounted]

    def mark_suspect(self, found: Collection[Mounted]) -> None:
        self.step()
        for mounted in found:
            mounted.suspect = True

    def start_index(self, blob: BlobRef, view: Digest) -> object:
        return self

    def drop(self, layer_hex: str) -> None:
        self.step()
        self.dropped = True

    async def wait(self, job: object, wait_s: float) -> bool:
        """Of a new index, the last step of all."""
        self.over.set()
        return True

    async def discard(self, layer: Layer) -> str:
        raise AssertionError(f"the bytes of {layer.blob} are right")


@pytest.mark.parametrize("steps", range(STEPS + 1))
async def test_a_kill_leaves_the_index_to_the_next_daemon_or_nobody_on_it(
    tmp_path: Path, steps: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        looking = Looking(tmp_path / "node", pool, "registry")
        image = Elsewhere(tmp_path / "elsewhere", ("one",))
        blob = image.layers[0].blob
        lying = with_set_uid((image.directory / f"{blob.hex}.idx").read_bytes())
        origin = Provenance(
            Origin.REGISTRY, repositories=(REPOSITORY,), view=image.layers[0].diff_id
        )
        looking.shelf.vouch(blob, origin)
        looking.shelf.path(blob).write_bytes(lying)
        node = Node(looking, image, steps)
        comparison = Comparison(node.means())
        comparison.start()
        async with asyncio.timeout(30):
            await node.over.wait()
        await comparison.stop()
        looking.start("registry")
        left = looking.shelf.get(blob) is not None
        assert node.mounted.suspect or left
        assert not left or not looking.shelf.provenance(blob).own
        assert left == (steps < STEPS)
        assert left or node.dropped  # the metadata that it was mounted by


def test_what_nobody_knows_of_a_wrong_index_is_not_told() -> None:
    blob = digest_of(b"layer")
    known = Wrong(blob, digest_of(b"artifact"), "registry.example/app", "why")
    assert known.source == "that came from registry.example/app"
    assert str(digest_of(b"artifact")) in known.consequence
    unknown = Wrong(blob, None, "", "why")
    assert (unknown.source, unknown.consequence) == ("of unknown origin", "")
