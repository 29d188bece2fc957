"""One test bed: a directory, a shaped link, a registry and as many containerds as are asked for.

``with Bed(Shape(200)) as bed:`` starts link and registry; leaving it, or the death of the process
and the next bed's start, takes everything away again: servers, containers, mounts, files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.bed.containerd import Containerd
from bench.bed.ember import Ember
from bench.bed.gobin import CACHE
from bench.bed.leftovers import clear, lock, sweep
from bench.bed.link import Link, Shape
from bench.bed.process import BedError
from bench.bed.registry import Registry

BASE = Path("/var/tmp/ember-bed")
UNFIT = {"tmpfs", "overlay", "ramfs", "nfs", "9p"}


def drop_page_cache() -> None:
    """Write back and forget all cached pages, dentries and inodes: what follows is cold."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def file_system(directory: Path) -> str:
    """The type of the file system that ``directory`` is on."""
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4]
        if f"{directory}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(best):
            best, kind = point, rest.split(" ")[0]
    return kind


class Bed:
    """The bed itself; ``base`` must be on a real file system (ext4, xfs, btrfs).

    The registry's storage is in ``cache`` and outlives the bed, unless ``keeps`` says no.
    """

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        base: Path = BASE,
        cache: Path = CACHE,
        keeps: bool = True,
    ) -> None:
        self.name = f"ember-{secrets.token_hex(4)}"
        self.directory = base / self.name
        self.cache = cache
        self.link = Link(self.name, shape or Shape())
        storage = cache / "bed" / "registry" if keeps else self.directory / "registry"
        self.registry = Registry(self.directory, storage, self.link)
        self._containerds: list[Containerd] = []
        self._embers: list[Ember] = []
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise BedError("the test bed needs root: it makes network namespaces and containers")
        base = self.directory.parent
        base.mkdir(parents=True, exist_ok=True)
        kind = file_system(base)
        if kind in UNFIT:
            raise BedError(f"{base} is on {kind}: containers need ext4, xfs or btrfs there")
        sweep(base)
        self.directory.mkdir(mode=0o700)
        self._lock = lock(self.directory)
        try:
            self.link.create()
            self.registry.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def containerd(
        self,
        major: int = 1,
        *,
        ember_socket: Path | None = None,
        ember_root: Path | None = None,
        pause: str = "",
        proxies: Mapping[str, tuple[Path, Path]] | None = None,
    ) -> Containerd:
        """Start a containerd of this bed; with CRI on Ember if ``pause`` names a sandbox image."""
        made = Containerd(
            self.directory,
            self.link,
            major=major,
            ember_socket=ember_socket,
            ember_root=ember_root,
            pause=pause,
            proxies=proxies,
        )
        self._containerds.append(made)
        made.start()
        return made

    def ember(self, containerd_major: int = 1) -> Ember:
        """An Ember for the containerd of that version; start it when that one runs.

        As it is it fetches only what is read, so that every byte that is counted was asked for.
        """
        address = self.directory / f"containerd{containerd_major}" / "containerd.sock"
        made = Ember(self.directory, self.link, address)
        made.configure(completion=False)
        self._embers.append(made)
        return made

    def close(self) -> None:
        """Stop and remove everything; safe to call twice."""
        for containerd in self._containerds:
            containerd.stop()
        self._containerds.clear()
        for ember in self._embers:
            ember.stop()
        self._embers.clear()
        self.registry.stop()
        if self._lock is not None:
            clear(self.directory)
            os.close(self._lock)
            self._lock = None
