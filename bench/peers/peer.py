"""What the bed must know of another snapshotter: its programs, its daemon, its form of an image.

A peer's daemon runs on the bed's link with a root of its own, which is emptied before each cold
trial. Fetching in the background is off in all of them, as in the bed's Ember: what is counted was
asked for.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.bed.image import Image
from bench.bed.leftovers import end_processes, remove_tree, unmount_below
from bench.bed.link import Shape
from bench.bed.process import BedError, Server, run
from bench.bed.registry import HOST
from bench.touched import Touched

CONVERT_S = 1200.0


class Peer(ABC):
    """One other snapshotter; ``name`` is what containerd knows it by."""

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.directory = bed.directory / f"peer-{self.name}"
        self.root = self.directory / "root"
        self.socket = self.directory / "snapshotter.sock"
        self._server: Server | None = None
        self._containerd: Containerd | None = None

    @classmethod
    def missing(cls) -> list[str]:
        """Its programs that are not on the path."""
        return [name for name in cls.programs if shutil.which(name) is None]

    @property
    def pid(self) -> int:
        if self._server is None:
            raise BedError(f"{self.name} is not running")
        return self._server.pid

    @abstractmethod
    def configuration(self, containerd: Containerd) -> str:
        """The daemon's configuration file."""

    @abstractmethod
    def command(self, configuration: Path) -> list[str]:
        """The words that start the daemon."""

    @abstractmethod
    def convert(self, containerd: Containerd, image: Image, target: str, what: Touched) -> None:
        """Make ``target`` of ``image``, which containerd has pulled for overlayfs, and push it.

        ``what`` a start touches is for those that put such files first.
        """

    def start(self, containerd: Containerd) -> None:
        """Start the daemon with an empty root; return when containerd reaches it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(exist_ok=True)
        configuration = self.directory / "config"
        configuration.write_text(self.configuration(containerd), encoding="utf-8")
        self._server = Server(
            self.name,
            [*self.bed.link.enter(), *self.command(configuration)],
            log=self.directory / "log",
        )
        self._containerd = containerd
        self._server.wait_until(self._answers)

    def _answers(self) -> bool:
        if not self.socket.exists() or self._containerd is None:
            return False
        try:
            self._containerd.ctr("snapshots", "--snapshotter", self.name, "ls", timeout_s=10)
        except BedError:
            return False
        return True

    def stop(self) -> None:
        """End the daemon, its mounts, and what it knows."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self.directory.exists():
            end_processes(self.directory)
            unmount_below(self.directory)
            remove_tree(self.root)
            self.socket.unlink(missing_ok=True)

    def converted(self, containerd: Containerd, image: Image, what: Touched) -> str:
        """The reference of its form of ``image``; made and pushed unless the registry has it."""
        tag = f"{self.name}-{image.manifest_digest.removeprefix('sha256:')[:12]}"
        target = f"{HOST}/{image.name}:{tag}"
        if self.bed.registry.has(image.name, tag):
            return target
        shape = self.bed.link.shape
        self.bed.link.reshape(Shape(0))  # what is pushed passes the link too
        try:
            self.convert(containerd, image, target, what)
        finally:
            self.bed.link.reshape(shape)
        return target

    def push(self, containerd: Containerd, target: str) -> None:
        """Push what was made in containerd's own store."""
        containerd.ctr("images", "push", "--plain-http", target, timeout_s=CONVERT_S)

    def tool(self, *words: str | Path) -> None:
        """Run one of its programs to its end, on the bed's link."""
        run([*self.bed.link.enter(), *words], timeout_s=CONVERT_S)
