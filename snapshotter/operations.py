"""What an operator can ask of a running daemon: status, pull, removal, drain.

Each answer is put together from the parts that know; nothing here keeps state of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Sequence,
)
from typing import Any

from snapshotter.content import Digest, chain_ids
from snapshotter.errors import (
    EmberError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from snapshotter.imagefs.catalog import Image, Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.oci.platform import Platform, host_platform
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.resolver import ResolvedImage
from snapshotter.rpc import cri
from snapshotter.rpc.blob_writer import check_namespace
from snapshotter.rpc.control import DrainState, PullEvent, Removal, WarmLayer, WarmState
from snapshotter.rpc.image_records import Record, choose, delete, every_record
from snapshotter.rpc.pull import Puller, PullStep
from snapshotter.status import Parts, containers, status_document
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

DRAIN_REPORT_S = 1.0
WARM_REPORT_S = 0.25
DRAIN_VIEWS = 4
PULL_EVENTS = 4096

Report = Callable[[PullStep], None]
Work = Callable[[ResolvedImage, Report], Coroutine[Any, Any, None]]


class DaemonOperations:
    """Implements rpc.control.Operations."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def status(self) -> dict[str, Any]:
        """The status document; docs/commands.md says what each field means."""
        return await status_document(self._parts)

    async def pull(self, image: str, namespace: str, platform: str) -> AsyncIterator[PullEvent]:
        """Resolve, then bring into containerd; the last event says done, and why not lazy.

        An empty ``namespace`` is the kubelet's where CRI uses this snapshotter, else containerd's
        default one; an empty ``platform`` is this node's.
        """
        parts = self._parts
        if namespace:
            check_namespace(namespace)
        wanted = Platform.parse(platform) if platform else host_platform()
        # Asked before anything is known of an image that cannot come.
        if await parts.containerd.snapshotter_exports(parts.snapshotter) is None:
            raise FailedPreconditionError(
                f"containerd at {parts.containerd.address} has no snapshotter"
                f" {parts.snapshotter!r}; docs/install.md has the lines"
                " that it needs, `ember doctor` checks them"
            )
        namespace = namespace or await cri.home(parts.containerd, parts.snapshotter)
        resolved = await self._resolve(image, platform)
        yield PullEvent(
            "resolved",
            total=len(resolved.layers),
            digest=str(resolved.target_digest),
            namespace=namespace,
        )
        await self._remember_origin(resolved)
        by_cri = (
            namespace == cri.NAMESPACE
            and wanted == host_platform()
            and await cri.uses(parts.containerd, parts.snapshotter)
        )
        work = self._by_cri if by_cri else self._by_containerd(namespace)
        async with contextlib.aclosing(self._follow(work, resolved)) as events:
            async for event in events:
                yield event
        known = parts.catalog.image(resolved.manifest_digest)
        yield PullEvent(
            "done",
            total=len(resolved.layers),
            digest=str(resolved.target_digest),
            reason=known.reason if known is not None else "",
            namespace=namespace,
        )

    async def _resolve(self, image: str, platform: str) -> ResolvedImage:
        wanted = Platform.parse(platform) if platform else host_platform()
        self._parts.registry.insist()
        resolved = await self._parts.registry.resolve(parse_reference(image), wanted)
        self._parts.foreign.forget(resolved.manifest_digest)  # what was not there is looked for
        if platform and wanted.rank(resolved.platform) is None:
            raise NotFoundError(f"{image} is for {resolved.platform}, not for {wanted}")
        return resolved

    async def warm(self, image: str, platform: str) -> AsyncGenerator[WarmState, None]:
        """Bring all of the image's bytes here; containerd is not asked and need not have it."""
        resolved = await self._resolve(image, platform)
        digest = str(resolved.target_digest)
        async with self._parts.warmer.warming(_document(resolved)) as warming:

            def state(*, done: bool = False) -> WarmState:
                layers = (
                    WarmLayer(
                        str(one.blob), one.size_bytes, one.done_bytes, one.fetched_bytes, one.state
                    )
                    for one in warming.progress()
                )
                return WarmState(digest, tuple(layers), done)

            yield state()
            while not await warming.wait(WARM_REPORT_S):
                yield state()
            yield state(done=True)

    async def _by_cri(self, resolved: ResolvedImage, report: Report) -> None:
        """Where CRI uses Ember its own pull is the one that the kubelet will look for."""
        parts = self._parts

        def is_lazy(manifest: Digest) -> bool:
            known = parts.catalog.image(manifest)
            return known is not None and known.lazy

        puller = cri.CriPuller(parts.containerd, parts.snapshotter, is_lazy)
        await puller.pull(resolved, parts.registry.login(resolved.reference), report)

    def _by_containerd(self, namespace: str) -> Work:
        parts = self._parts
        puller = Puller(parts.containerd, parts.leases, parts.registry, parts.snapshotter)
        return lambda resolved, report: puller.pull(resolved, namespace, report)

    async def _follow(self, work: Work, resolved: ResolvedImage) -> AsyncGenerator[PullEvent, None]:
        events: asyncio.Queue[PullStep | None] = asyncio.Queue(PULL_EVENTS)

        def report(step: PullStep) -> None:
            # What nobody reads for thousands of steps is dropped; the end always has its place.
            if events.qsize() < PULL_EVENTS - 1:
                events.put_nowait(step)

        task = asyncio.create_task(work(resolved, report), name=f"pull {resolved.reference}")
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (step := await events.get()) is not None:
                yield PullEvent(step.state, step.position, step.total, str(step.digest))
            await task
        finally:
            await end_all([task])

    async def _remember_origin(self, resolved: ResolvedImage) -> None:
        """A second blob of a view that is here is a source for it, though nobody will prepare it.

        containerd names snapshots by diffIDs and does not ask about blobs that unpack to the same.
        """
        document = _document(resolved)
        name, manifest, layers = resolved.reference, document.manifest, document.layers
        stands = self._stands_on(layers)
        known = self._parts.catalog.image(manifest) or stands
        given = stands is not None and await self._parts.decider.may_read(document)
        await self._parts.catalog.remember(
            Image(
                manifest,
                (str(name),),
                (name.name,) if given else (),
                layers,
                known.lazy if known is not None else False,
                known.reason if known is not None else "",
                self._parts.clock.wall_ns(),
            )
        )

    def _stands_on(self, layers: Sequence[Layer]) -> Image | None:
        """An image that has all of ``layers`` in the same order at its bottom: it was decided on,
        and nobody will be asked about these again."""
        chain = layers[-1].chain_id if layers else None
        for image in self._parts.catalog.images():
            if any(layer.chain_id == chain for layer in image.layers):
                return image
        return None

    async def remove(self, image: str, namespace: str, *, data_only: bool) -> Removal:
        """Drop data (and index and record); NotFoundError if ``image`` means nothing here.

        An empty ``namespace`` is that of a `pull` that names none.
        """
        parts = self._parts
        if namespace:
            check_namespace(namespace)
        found, names = self._meant(image)
        gone: Sequence[Record] = ()
        left: Sequence[Record] = ()
        if not data_only:
            records = await every_record(parts.containerd)
            namespace = namespace or await cri.home(parts.containerd, parts.snapshotter)
            choice = choose(records, names, namespace, image)
            gone, left = choice.gone, choice.left
            await delete(parts.containerd, gone)
        # What was indexed after a plain pull was indexed for the pull that comes after this.
        outcome = await parts.remover.remove(
            found, data_only=data_only, keep_indexes=bool(gone) and not found.lazy
        )
        parts.decider.forget(found.manifest)
        parts.foreign.forget(found.manifest)
        kept = outcome.kept
        if outcome.in_use:
            kept = [f"data of {found.manifest}: it is also {each}" for each in left] or kept
            kept += await self._users(found)
            if not data_only and not left:
                await parts.catalog.leave(found.manifest)
                kept.append(f"image {found.manifest}: in use; it goes when nothing uses it")
            held = {record.name for record in left}
            if held:
                await parts.catalog.unname(found.manifest, [n for n in names if n not in held])
        removed = [f"image {record}" for record in gone]
        return Removal(outcome.freed_bytes, (*removed, *outcome.removed), tuple(kept))

    def _meant(self, text: str) -> tuple[Image, Collection[str]]:
        """The image that ``text`` means, and which of its names: all, if it is a digest."""
        catalog = self._parts.catalog
        found, name = catalog.find(text), text
        if not found:
            with contextlib.suppress(EmberError):
                name = str(parse_reference(text))
                found = catalog.find(name)
        if not found:
            raise NotFoundError(f"no image {text!r} is known here; `ember images` lists them")
        if len(found) > 1:
            all_of_them = ", ".join(str(image.manifest) for image in found)
            raise InvalidArgumentError(f"{text!r} may be any of {all_of_them}")
        names = found[0].names
        return found[0], [n for n in names if name in (n, n.rsplit("@", 1)[0])] or names

    async def _users(self, image: Image) -> list[str]:
        """The containers on ``image``, whether they run or not."""
        running = await containers(self._parts)
        return [
            f"image {name}: container {container} is made of it"
            for name in image.names
            for container in running.get(name, ())
        ]

    async def drain(self) -> AsyncIterator[DrainState]:
        """Complete every view that is mounted; what fails is named and does not stop the rest."""
        parts = self._parts
        failed: list[str] = []
        work = asyncio.create_task(self._complete_all(failed.append), name="drain")
        try:
            while not work.done():
                yield self._left(failed)
                await asyncio.wait([work], timeout=DRAIN_REPORT_S)
            await work
            await parts.store.flush()
            yield self._left(failed)
        finally:
            await end_all([work])

    def _incomplete(self) -> list[Digest]:
        found: dict[Digest, None] = {}
        for mounted in self._parts.mounts.instances():
            if mounted.guarded and self._parts.store.get(mounted.view) is None:
                found[mounted.view] = None
        found.update(dict.fromkeys(self._parts.views.incomplete()))
        return list(found)

    def _left(self, failed: list[str]) -> DrainState:
        views = self._incomplete()
        left, waiting = 0, []
        for digest in views:
            if trouble := self._parts.road.tally(digest).trouble:
                waiting.append(f"{self._view(digest)} waits: {trouble}")
            view = self._parts.store.get(digest)
            if view is not None:
                missing = view.chunk_count - view.readable_count
                left += min(view.length_bytes, missing * view.chunk_bytes)
        return DrainState(len(views), left, tuple(failed), tuple(waiting))

    def _view(self, digest: Digest) -> str:
        """The view as an operator knows it."""
        catalog = self._parts.catalog
        blobs = catalog.layers_of_view(digest)
        names = sorted({name for blob in blobs for name in catalog.names_of_blob(blob)})
        return f"view {digest} ({', '.join(names) or 'of no image that is known'})"

    async def _complete_all(self, complain: Callable[[str], None]) -> None:
        slots = asyncio.Semaphore(DRAIN_VIEWS)

        async def complete(digest: Digest) -> None:
            async with slots:
                try:
                    await self._parts.road.complete(digest)
                except EmberError as error:
                    complain(f"{self._view(digest)}: {error}")
                except Exception as error:
                    log.exception("draining %s failed", digest)
                    complain(f"{self._view(digest)}: {type(error).__name__}, see the log")

        await self._parts.mounts.let_go_of_strays()
        elsewhere = await self._parts.views.perhaps_read()
        async with asyncio.TaskGroup() as group:
            for digest in dict.fromkeys((*self._incomplete(), *elsewhere)):
                group.create_task(complete(digest))


def _document(resolved: ResolvedImage) -> ImageDocument:
    """The image as the parts for images know it."""
    diff_ids = [layer.diff_id for layer in resolved.layers]
    layers = tuple(
        Layer(layer.digest, layer.diff_id, chain_id, layer.size)
        for layer, chain_id in zip(resolved.layers, chain_ids(diff_ids), strict=True)
    )
    name = resolved.reference
    return ImageDocument(resolved.manifest_digest, str(name), name.name, layers)
