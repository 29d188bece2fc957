"""Indexes and views become mounted layers, one EROFS instance for each metadata image.

A view that is complete is mounted from the unmarked path and costs nothing from then on; any other
through the guarded bind mount, and only after the guard knows it. A link in the snapshot's
directory appears when the mount is there and not before: what comes too early fails, and never
sees an empty layer. Mounts outlive the daemon; a record beside each says what it is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from ioengine import mounts
from ioengine.directories import TEMPORARY, write_whole
from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError, UnavailableError
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.metadata import MetadataImage, MetadataImages
from snapshotter.imagefs.mounted import Mounted, decode, encode
from snapshotter.imagefs.standing import Holders, container_at, noted, standing, still_there
from snapshotter.imagefs.views import Views
from snapshotter.keyed_locks import KeyedLocks
from snapshotter.snapshots.lazy import StackEntry
from snapshotter.unbroken import Unbroken

log = logging.getLogger(__name__)

STRAYS_S = 300.0


class LayerMounts:
    """All EROFS instances of this node. Life story: ``restore`` once, then mount and release."""

    def __init__(
        self,
        directory: Path,
        views: Views,
        metadata: MetadataImages,
        executor: Executor,
        makers: Executor,
        *,
        directio: bool,
    ) -> None:
        self.directory = directory
        self._views = views
        self.metadata = metadata
        self._executor = executor
        self._makers = makers
        self._directio = directio
        self._mounted: dict[str, Mounted] = {}
        self._locks = KeyedLocks[Digest]()
        self._making = KeyedLocks[Digest]()
        self._users: dict[Path, set[Path]] = {}
        self._work = Unbroken()

    def restore(self, links: Iterable[Path]) -> list[Mounted]:
        """Find the mounts that an earlier daemon left, and by ``links`` who stands on them.

        After a reboot nothing is mounted and every link dangles: a mount that comes before Ember
        was asked fails, and never sees an empty layer.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)  # set-user-ID programs of images are not for local users
        links = list(links)
        there = {mount.target for mount in mounts.mountinfo()}
        for record in sorted(self.directory.glob("*.json")):
            if (target := record.with_suffix("")) in there:
                with _passed_over(record):
                    mounted = decode(record.read_text(encoding="utf-8"), target)
                    self._mounted[mounted.name] = mounted
        known = {mounted.target for mounted in self._mounted.values()}
        for target in sorted(there - known):
            if target.parent == self.directory:
                with _passed_over(target):
                    _take_down_unknown(target, links)
        for leftover in sorted(self.directory.iterdir()):
            of_known = leftover in known or leftover.with_suffix("") in known
            if leftover.suffix == TEMPORARY or not of_known:
                with _passed_over(leftover):
                    _sweep_away(leftover)
        for link in links:
            if link.is_symlink():
                self._users.setdefault(link.readlink().parent, set()).add(link)
        return list(self._mounted.values())

    async def sweep(self) -> None:
        """Unmount what no snapshot stands on: an earlier daemon died between a removal and this.

        Called once the snapshots' directories are in order, and before any snapshot is made.
        """
        for mounted in self.instances():
            async with self._lock(mounted.view):
                users = self._users.get(mounted.target, set())
                users.difference_update([link for link in users if not link.is_symlink()])
                await self._retire(mounted)

    def instances(self) -> list[Mounted]:
        """Every EROFS instance that is mounted."""
        return list(self._mounted.values())

    def of_view(self, view: Digest) -> list[Mounted]:
        """The instances whose data is ``view``."""
        return [m for m in list(self._mounted.values()) if m.view == view]

    def mark_suspect(self, found: Sequence[Mounted]) -> None:
        """Set instances aside: who uses them goes on, whoever comes next gets a new one."""
        there = mounts.mountinfo()
        for mounted in found:
            self._mounted.pop(mounted.key, None)
            mounted.suspect = True
            mounted.holders = noted(standing(there, mounted.target, self._names(mounted)))
            self._mounted[mounted.name] = mounted
            self._record(mounted)

    async def doubted(self) -> dict[Digest, list[str]]:
        """The layers of which somebody still sees a suspect instance, and these containers."""
        suspects = [(m, self._names(m)) for m in self.instances() if m.suspect]
        found: dict[Digest, set[str]] = {}
        if suspects:
            there = await asyncio.to_thread(mounts.mountinfo)
            for mounted, names in suspects:
                holders = await asyncio.to_thread(_seen, mounted, names, there)
                if holders:
                    found.setdefault(mounted.layer, set()).update(map(container_at, holders))
        return {layer: sorted(users) for layer, users in found.items()}

    def _names(self, mounted: Mounted) -> set[Path]:
        """The paths that lead to the instance just now."""
        return {mounted.root, *self._users.get(mounted.target, ())}

    async def _seen_by(self, mounted: Mounted) -> Holders:
        """Who sees a suspect instance."""
        there = await asyncio.to_thread(mounts.mountinfo)
        return await asyncio.to_thread(_seen, mounted, self._names(mounted), there)

    async def mount(
        self, entry: StackEntry, index: LayerIndex, below: Sequence[tuple[StackEntry, str]]
    ) -> str:
        """Mount ``entry`` (again, if need be) and link its directory; returns its image's key.

        overlayfs takes no directory twice (ELOOP), and an image may well have a layer twice: each
        time that a layer comes again in one chain it is another instance.
        """
        return await self._work.finish(self._mount(entry, index, below))

    async def _mount(
        self, entry: StackEntry, index: LayerIndex, below: Sequence[tuple[StackEntry, str]]
    ) -> str:
        loop = asyncio.get_running_loop()
        image = await self._image(index, below)
        async with self._lock(index.diff_id):
            again = sum(key == image.key for _, key in below)
            instance = f"{image.key}~{again}" if again else image.key
            mounted = self._mounted.get(instance)
            if mounted is not None and not mounts.is_mount_point(mounted.target):
                log.warning("%s was unmounted by somebody else; mounted again", mounted.target)
                await self._detach(mounted, let_go=False)
                mounted = None
            if mounted is None:
                guarded = not await self._views.complete(index)
                if guarded:
                    await self._views.guard(index)
                target = self._new_target(instance)
                mounted = Mounted(instance, target, index.layer, index.diff_id, guarded)
                try:
                    await loop.run_in_executor(self._executor, self._attach, mounted, image.path)
                except UnavailableError as error:
                    # A metadata image that was damaged on disk, or removed since it was made, is
                    # made anew from the index, once.
                    log.warning("%s; its metadata image is made anew", error)
                    self.metadata.drop(index.layer.hex)
                    image = await self._image(index, below)
                    await loop.run_in_executor(self._executor, self._attach, mounted, image.path)
                self._mounted[instance] = mounted
            await self._lead(entry.directory, mounted)
        return image.key

    async def _lead(self, link: Path, mounted: Mounted) -> None:
        """Have ``link`` lead to the instance, and no longer to a suspect one."""
        loop = asyncio.get_running_loop()
        left = [m for m in self.of_view(mounted.view) if m.suspect and link in self._names(m)]
        for suspect in left:
            suspect.holders = await self._seen_by(suspect)
            self._record(suspect)
        await loop.run_in_executor(self._executor, _link, link, mounted.root)
        self._users.setdefault(mounted.target, set()).add(link)
        for suspect in left:
            self._users[suspect.target].discard(link)
            await self._retire(suspect)

    async def _retire(self, mounted: Mounted) -> None:
        """Unmount an instance that no name leads to, unless containers see it and are to know."""
        if self._users.get(mounted.target):
            return
        if not mounted.suspect or not await self._seen_by(mounted):
            await self._detach(mounted)

    async def _image(
        self, index: LayerIndex, below: Sequence[tuple[StackEntry, str]]
    ) -> MetadataImage:
        """Made once at a time for a layer, and while mounts of its view come and go."""
        loop = asyncio.get_running_loop()
        async with self._making.hold(index.layer):
            return await loop.run_in_executor(self._makers, self.metadata.of, index, below)

    def _new_target(self, key: str) -> Path:
        """A path that no link has ever led to: until it is mounted nobody shall find it empty."""
        return self.directory / f"{key}.{secrets.token_hex(6)}"

    def _attach(self, mounted: Mounted, image: Path) -> None:
        mounted.target.mkdir()
        try:
            self._record(mounted)
            device = self._views.path(mounted.view, guarded=mounted.guarded)
            directio = self._directio and not mounted.guarded
            mounts.mount_erofs(image, mounted.target, [device], directio=directio)
        except OSError as error:
            self._forget(mounted)
            raise UnavailableError(
                f"layer {mounted.layer} can't be mounted: {error}; `ember doctor` tells what the"
                " kernel lacks"
            ) from None

    def _record(self, mounted: Mounted) -> None:
        path = mounted.target.with_name(mounted.target.name + ".json")
        write_whole(path, encode(mounted).encode(), synced=False)  # it is of this boot

    async def release(self, directory: Path) -> None:
        """The snapshot that linked ``directory`` is gone: unmount what only it needed."""
        await self._work.finish(self._release(directory))

    async def _release(self, directory: Path) -> None:
        for mounted in list(self._mounted.values()):
            users = self._users.get(mounted.target, set())
            if directory in users:
                async with self._lock(mounted.view):
                    if users == {directory}:  # under the lock: another may have come to it
                        await self._detach(mounted)
                    users.discard(directory)
            elif mounted.suspect:
                async with self._lock(mounted.view):
                    await self._retire(mounted)

    async def stood_on(self, view: Digest) -> bool:
        """Whether another mount shows an instance of ``view``: an overlay on it, or a bind.

        Looked for by directory; the proof that nobody has the file open is the kernel's, later.
        """
        there = await asyncio.to_thread(mounts.mountinfo)
        for mounted in self.of_view(view):
            if standing(there, mounted.target, self._names(mounted)):
                return True
            if await asyncio.to_thread(still_there, mounted.holders):
                return True
        return False

    @contextlib.asynccontextmanager
    async def without(self, view: Digest) -> AsyncIterator[None]:
        """Unmount every instance of ``view``, and let none be mounted until the block ends.

        Overlays that stand on one hold it until their own end. Not to be cancelled in between.
        """
        async with self._lock(view):
            for mounted in self.of_view(view):
                await self._detach(mounted)
            yield

    def _lock(self, view: Digest) -> contextlib.AbstractAsyncContextManager[None]:
        return self._locks.hold(view)

    async def keep_up(self) -> None:
        """For ever: now and then close what only a container that has outlived its mount read.

        If it still runs, its next read has the view opened and guarded again.
        """
        while True:
            await asyncio.sleep(STRAYS_S)
            await self.let_go_of_strays()

    async def let_go_of_strays(self) -> None:
        """Close the views that are guarded without a mount of ours."""
        mounted = {instance.view for instance in self.instances()}
        await self._views.let_go_of_all_but(mounted)

    async def _detach(self, mounted: Mounted, *, let_go: bool = True) -> None:
        loop = asyncio.get_running_loop()
        if self._mounted.get(mounted.name) is not mounted:
            return
        links = self._users.pop(mounted.target, set())
        try:
            await loop.run_in_executor(self._executor, self._take_down, mounted, links)
        except OSError as error:
            log.warning("unmounting %s: %s; it is tried again later", mounted.target, error)
            return
        del self._mounted[mounted.name]
        if let_go and not self.of_view(mounted.view):
            # Ends what is fetched, and syncs: nobody who removes a snapshot need wait for that.
            self._work.begin(self._views.let_go(mounted.view))

    def _take_down(self, mounted: Mounted, links: set[Path]) -> None:
        """The links go first: a mount that comes too late fails, and sees no empty directory."""
        _unlink(links, mounted.target)
        mounts.unmount(mounted.target, detach=True)
        self._forget(mounted)

    def _forget(self, mounted: Mounted) -> None:
        mounted.target.with_name(mounted.target.name + ".json").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            mounted.target.rmdir()


def _seen(mounted: Mounted, names: Collection[Path], there: Sequence[mounts.Mount]) -> Holders:
    """Who sees a suspect instance: those noted, and whoever its ``names`` led to it since."""
    return still_there(mounted.holders) | noted(standing(there, mounted.target, names))


@contextlib.contextmanager
def _passed_over(path: Path) -> Iterator[None]:
    """One bad file is named and left where it is; it keeps nobody from what is sound."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, InvalidArgumentError) as error:
        log.error("%s is passed over, as it can't be used: %r", path, error)


def _take_down_unknown(target: Path, links: Iterable[Path]) -> None:
    """What runs on an instance keeps it; whoever starts next gets one that is known."""
    log.error("%s is mounted, but its record can't be read: it is mounted anew when needed", target)
    _unlink(links, target)
    mounts.unmount(target, detach=True)


def _sweep_away(leftover: Path) -> None:
    if leftover.is_dir():
        leftover.rmdir()
    elif leftover.suffix in (".json", TEMPORARY):
        leftover.unlink()


def _unlink(links: Iterable[Path], target: Path) -> None:
    """Remove those of ``links`` that lead into what is mounted at ``target``."""
    for link in links:
        if link.is_symlink() and link.readlink().parent == target:
            link.unlink(missing_ok=True)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
