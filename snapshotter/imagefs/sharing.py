"""Pushing what this node built: the indexes of an image, as an artifact beside it, once.

In the background, one image at a time and only while no first pull is going on. Where the same
indexes lie already nothing is pushed, unless nobody is trusted any more who signed them. What may
pass is tried again a few times; what the registry will not have is said once. No pull ever notices.
Nothing goes to a repository that does not give this node all of the layers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import EmberError, UnavailableError
from snapshotter.image.windows import WINDOWS_SUFFIX
from snapshotter.imagefs.admission import Admission, Giver
from snapshotter.imagefs.catalog import Catalog, Image
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.provenance import Origin
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.verdicts import Verdicts
from snapshotter.indexes.publish import LocalIndex
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

WAITING = 8192
"""More images than are kept; what has no place is for the next daemon."""
LATER = 1024
POLL_S = 2.0
WAITS_S = (60.0, 300.0, 1500.0)


@dataclass(frozen=True, slots=True)
class Placed:
    """An artifact beside an image: whether it is ``new``, and whose ``key`` signed it, if any."""

    new: bool
    key: str


class Publisher(Giver, Protocol):
    """Registries (daemon/pushing.py)."""

    def keys(self) -> Collection[str] | None:
        """The ids of keys whose signature is as good as ours now; None: none is needed."""
        ...

    async def publish(
        self, repository: str, image: Digest, indexes: Sequence[LocalIndex]
    ) -> Placed:
        """Have an artifact of ``indexes`` beside the image, if none is there already.

        UnavailableError may pass; any other EmberError will not.
        """
        ...


class Sharing:
    """Life story: ``start``, ``built`` for each layer that this node has indexed, ``stop``."""

    def __init__(
        self,
        catalog: Catalog,
        shelf: Shelf,
        ingest: Ingest,
        verdicts: Verdicts,
        publisher: Publisher,
        clock: Clock,
        count: Callable[[str], object],
    ) -> None:
        """``count`` is told how each image ended: pushed, there, refused or failed."""
        self._catalog = catalog
        self._shelf = shelf
        self._ingest = ingest
        self._verdicts = verdicts
        self._publisher = publisher
        self._clock = clock
        self._count = count
        self._admission = Admission(catalog, publisher)
        self._keys = publisher.keys()
        self._waiting: dict[Digest, None] = {}
        self._given_up: dict[tuple[Digest, str], None] = {}
        self._tries: dict[Digest, int] = {}
        self._later: dict[Digest, asyncio.Task[None]] = {}
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what an earlier daemon did not come to."""
        for image in self._catalog.images():
            self._want(image)
        self._task = asyncio.create_task(self._run(), name="sharing indexes")

    async def stop(self) -> None:
        """Stop in the middle; an artifact is there wholly or not at all."""
        await end_all([*self._later.values(), self._task])

    def built(self, blob: Digest) -> None:
        """This node has built the index of ``blob``."""
        for image in self._catalog.images_of_blob(blob):
            self._want(image)

    def _want(self, image: Image) -> None:
        if self._place(image) is None or image.manifest in self._later:
            return
        if len(self._waiting) < WAITING:
            self._waiting[image.manifest] = None
            self._awake.set()

    def _place(self, image: Image) -> str | None:
        """Where its indexes are to lie; None if nothing is left to do."""
        repository = next(iter(image.places), None)
        if repository is None or (image.manifest, repository) in self._given_up:
            return None
        key = self._verdicts.pushed(image.manifest, repository)
        served = key is not None and (self._keys is None or key in self._keys)
        return None if served else repository

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            await self._clock.sleep(POLL_S)
            self._keys = self._publisher.keys()
            while self._waiting and not self._ingest.jobs():
                manifest = next(iter(self._waiting))
                del self._waiting[manifest]
                image, tries = self._catalog.image(manifest), self._tries.pop(manifest, 0)
                if image is not None:
                    await self._share(image, tries)
            if not self._waiting:
                self._awake.clear()

    async def _share(self, image: Image, tries: int) -> None:
        repository = self._place(image)
        if repository is None:
            return
        try:
            indexes = await self._own(image)
            if indexes is None:
                return
            # An index tells of a layer's files, and its windows are content: who cannot have the
            # layer there must not get them.
            await self._admission.check(repository, image.layers)
            placed = await self._publisher.publish(repository, image.manifest, indexes)
            now_ns = self._clock.wall_ns()
            await self._verdicts.note_pushed(image.manifest, repository, placed.key, now_ns)
        except UnavailableError as error:
            if tries < len(WAITS_S) and len(self._later) < LATER:
                self._again(image, tries)
                return
            self._give_up(image, repository, "failed", str(error))
        except EmberError as error:
            self._give_up(image, repository, "refused", str(error))
        except Exception as error:
            log.exception("sharing the indexes of %s failed", image.manifest)
            self._give_up(image, repository, "failed", type(error).__name__)
        else:
            self._count("pushed" if placed.new else "there")
            how = "are pushed to" if placed.new else "lie already in"
            log.info("the indexes of %s %s %s", _name(image), how, repository)

    async def _own(self, image: Image) -> list[LocalIndex] | None:
        """The indexes of all layers, if this node has built every one."""
        found: dict[Digest, LocalIndex] = {}
        for layer in image.layers:
            await asyncio.sleep(0)  # opening one takes milliseconds, and there may be thousands
            if self._shelf.provenance(layer.blob).origin is not Origin.HERE:
                return None
            index = self._shelf.get(layer.blob)
            if index is None or index.diff_id != layer.diff_id:
                return None
            windows = self._shelf.path(layer.blob).with_suffix(WINDOWS_SUFFIX)
            found[layer.blob] = LocalIndex(index, windows if index.windows_bytes else None)
        return list(found.values()) or None

    def _again(self, image: Image, tries: int) -> None:
        async def later() -> None:
            await self._clock.sleep(WAITS_S[tries])
            del self._later[manifest]
            self._want(image)
            if manifest in self._waiting:
                self._tries[manifest] = tries + 1

        manifest = image.manifest
        self._later[manifest] = asyncio.create_task(later(), name=f"share {manifest}")

    def _give_up(self, image: Image, repository: str, outcome: str, why: str) -> None:
        while len(self._given_up) >= WAITING:
            self._given_up.pop(next(iter(self._given_up)))
        self._given_up[image.manifest, repository] = None
        self._count(outcome)
        log.warning("the indexes of %s are not pushed: %s", _name(image), why)


def _name(image: Image) -> str:
    return image.names[0] if image.names else str(image.manifest)
