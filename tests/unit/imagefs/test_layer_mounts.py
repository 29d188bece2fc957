"""Mounts and the record of them stay one, whoever hangs up in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ioengine.mounts import Mount
from snapshotter.content import Digest
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs import layer_mounts
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.metadata import MetadataImage, MetadataImages
from snapshotter.imagefs.views import Views as RealViews
from snapshotter.snapshots.lazy import StackEntry
from tests.fakes.lazy import digest


class Kernel:
    """mount(2) and umount(2) on a set; each call waits while the gate is shut."""

    def __init__(self) -> None:
        self.there: set[Path] = set()
        self.made = 0
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()

    def mount_erofs(self, image: Path, target: Path, devices: Any, *, directio: bool) -> None:
        self._pass()
        self.there.add(target)
        self.made += 1

    def unmount(self, target: Path, *, detach: bool = False) -> bool:
        self._pass()
        self.there.discard(target)
        return True

    def is_mount_point(self, target: Path) -> bool:
        return target in self.there

    def mountinfo(self) -> list[Any]:
        return [
            Mount(n, 0, (0, n), Path("/"), target, (), "erofs", "", ())
            for n, target in enumerate(self.there)
        ]

    def _pass(self) -> None:
        self.busy.set()
        assert self.gate.wait(10)


class Views(RealViews):
    """One view, never complete; who was let go of is noted."""

    def __init__(self) -> None:
        self.let_go_of: list[Digest] = []

    async def complete(self, index: LayerIndex) -> bool:
        return False

    async def guard(self, index: LayerIndex) -> None: ...

    async def let_go(self, view: Digest) -> None:
        self.let_go_of.append(view)

    def path(self, view: Digest, *, guarded: bool) -> Path:
        return Path("/views") / view.hex


class Metadata(MetadataImages):
    """Images without a chain, made while the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def of(self, index: LayerIndex, below: Sequence[tuple[StackEntry, str]]) -> MetadataImage:
        assert self.gate.wait(10)
        return MetadataImage(index.layer.hex, Path("/metadata"))


class Index(LayerIndex):
    """As far as a mount looks at it."""

    def __init__(self, layer: str = "layer", view: str = "view") -> None:
        self.layer = digest(layer)
        self.diff_id = digest(view)


class Scene:
    """LayerMounts over a kernel that is a set."""

    def __init__(
        self, directory: Path, pool: ThreadPoolExecutor, makers: ThreadPoolExecutor
    ) -> None:
        self.metadata = Metadata()
        self.kernel, self.views, self.index = Kernel(), Views(), Index()
        self.links = directory / "snapshots"
        self.mounts = LayerMounts(
            directory / "layers",
            self.views,
            self.metadata,
            pool,
            makers,
            directio=False,
        )
        self.mounts.restore(())

    def entry(self, number: int) -> StackEntry:
        link = self.links / str(number) / "fs"
        return StackEntry(number, str(number), link, self.index.layer, None, self.index.diff_id)

    async def mount(self, number: int) -> None:
        await self.mounts.mount(self.entry(number), self.index, [])

    async def cut_short(self, task: asyncio.Task[Any]) -> None:
        """Cancel a caller while the kernel is at work for it."""
        await asyncio.to_thread(self.kernel.busy.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.kernel.gate.set()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(2) as makers:
        made = Scene(tmp_path, pool, makers)
        monkeypatch.setattr(layer_mounts, "mounts", made.kernel)
        yield made


async def test_a_mount_whose_caller_hung_up_is_used_by_the_next(scene: Scene) -> None:
    scene.kernel.gate.clear()
    await scene.cut_short(asyncio.create_task(scene.mount(1)))
    await scene.mount(1)
    assert scene.kernel.made == 1
    (mounted,) = scene.mounts.instances()
    assert scene.entry(1).directory.readlink() == mounted.root


async def test_a_removal_whose_caller_hung_up_leaves_no_link_to_an_empty_directory(
    scene: Scene,
) -> None:
    await scene.mount(1)
    scene.kernel.busy.clear()
    scene.kernel.gate.clear()
    await scene.cut_short(asyncio.create_task(scene.mounts.release(scene.entry(1).directory)))
    await scene.mount(2)
    assert scene.entry(2).directory.readlink().parent in scene.kernel.there
    assert not scene.entry(1).directory.is_symlink()


async def test_what_somebody_else_unmounted_is_mounted_again(scene: Scene) -> None:
    await scene.mount(1)
    scene.kernel.there.clear()
    await scene.mount(1)
    assert scene.entry(1).directory.readlink().parent in scene.kernel.there
    assert len(scene.mounts.instances()) == 1
    await asyncio.sleep(0)
    assert scene.views.let_go_of == []


async def test_no_image_that_is_being_made_holds_up_a_removal(scene: Scene) -> None:
    await scene.mount(1)
    scene.metadata.gate.clear()
    slow = []
    for number in range(2, 8):
        index = Index(f"layer {number}", f"view {number}")
        slow.append(scene.mounts.mount(scene.entry(number), index, []))
    mounting = asyncio.gather(*slow)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await scene.mounts.release(scene.entry(1).directory)
    assert scene.kernel.there == set()
    scene.metadata.gate.set()
    await mounting
    assert len(scene.kernel.there) == 6


async def test_not_even_one_of_the_same_layer_does(scene: Scene) -> None:
    """A layer may need another image for each chain that it stands on."""
    await scene.mount(1)
    scene.metadata.gate.clear()
    mounting = asyncio.create_task(scene.mount(2))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await scene.mounts.release(scene.entry(1).directory)
    assert scene.kernel.there == set()
    scene.metadata.gate.set()
    await mounting
    assert scene.entry(2).directory.readlink().parent in scene.kernel.there


async def test_a_view_is_let_go_of_with_its_last_instance(scene: Scene) -> None:
    await scene.mount(1)
    await scene.mount(2)
    await scene.mounts.release(scene.entry(1).directory)
    assert scene.views.let_go_of == []
    await scene.mounts.release(scene.entry(2).directory)
    assert scene.views.let_go_of == [scene.index.diff_id]
    assert scene.kernel.there == set()


async def test_a_start_sweeps_away_half_written_records_and_keeps_the_whole_ones(
    scene: Scene,
) -> None:
    await scene.mount(1)
    (mounted,) = scene.mounts.instances()
    for name in (mounted.target.name, "gone.0123456789ab"):
        (scene.mounts.directory / f"{name}.tmp").write_text("{")
    assert [each.target for each in scene.mounts.restore(())] == [mounted.target]
    left = {path.name for path in scene.mounts.directory.iterdir()}
    assert left == {mounted.target.name, f"{mounted.target.name}.json"}
