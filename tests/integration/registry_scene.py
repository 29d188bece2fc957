"""A node whose registry can be made to misbehave while containers read.

The registry is the tests' own, on the bed's link. Readers are processes of their own that check
every byte; all of it is bounded in time and taken apart at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import re
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.cases.images import OCI, Blob, ImageCase, as_it_is, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.fakes.registry import FakeRegistry
from tests.integration.test_daemon_manners import node_on
from tests.node import Node
from tests.patience import until
from tests.readers import ended_well, reader, sha256_of

T = TypeVar("T")
MISS_S = 4.0
CLONE_NEWNET = 0x40000000
_COMPLAINT = re.compile(
    r"a reader of view sha256:(?P<view>[0-9a-f]{64}) gets an error for bytes (?P<start>\d+) to"
    r" (?P<end>\d+): (?P<why>.+)"
)


class Registries:
    """Faulty registries on the bed's link, served by a thread that has entered its namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        descriptor = os.open(f"/run/netns/{self._namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) == 0
        os.close(descriptor)
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def start(
        self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> FakeRegistry:
        registry = FakeRegistry(tls, address)
        registry.port = port
        self.do(registry.start())
        return registry

    @contextlib.contextmanager
    def another(
        self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> Iterator[FakeRegistry]:
        """One more registry for a while."""
        registry = self.start(address, port, tls)
        try:
            yield registry
        finally:
            self.do(registry.stop())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@dataclass(frozen=True)
class Complaint:
    """A line of the log about a read that failed."""

    view: str
    start: int
    end: int
    why: str


class Scene:
    """A node with a registry that can be made to misbehave."""

    def __init__(self, node: Node, registries: Registries) -> None:
        self.node = node
        self.registries = registries
        self.registry = registries.start()

    def add(self, case: ImageCase, registry: FakeRegistry | None = None) -> str:
        """Push; returns the reference."""
        registry = registry or self.registry
        for content in case.contents:
            registry.add_blob(case.repository, content)
        for n, document in enumerate(case.documents):
            tag = "1" if n == len(case.documents) - 1 else None
            kind = f"{OCI}.manifest.v1+json"
            registry.add_manifest(case.repository, document, kind, tag)
        return f"{registry.authority}/{case.repository}:1"

    def lazily(self, case: ImageCase, registry: FakeRegistry | None = None) -> str:
        """Have the image's index here and none of its bytes."""
        registry = registry or self.registry
        reference = self.add(case, registry)
        self.pull_index(reference, case)
        registry.seen.clear()
        return reference

    def pull_index(self, reference: str, case: ImageCase) -> None:
        """A first pull, its data dropped."""
        pulled = self.node.pull(reference)
        assert pulled.lazy_layers == 2, pulled.reason
        with self.node.mounted(case.chain_id):
            pass
        # A foreign overlay without an upper directory may look like one on ours while it is there.
        assert self.node.until(lambda: not self.node.drop(reference).kept, 10)

    def log_since(self, mark: int) -> str:
        return self.node.ember.log()[mark:]

    def complaints(self, mark: int) -> list[Complaint]:
        """What the log says of reads that failed."""
        found = _COMPLAINT.finditer(self.log_since(mark))
        return [
            Complaint(f"sha256:{line['view']}", int(line["start"]), int(line["end"]), line["why"])
            for line in found
        ]


@contextlib.contextmanager
def scene_in(
    directory: Path,
    more: Callable[[Path], str] = lambda directory: "",
    *,
    miss_s: float = MISS_S,
    level: str = "info",
    environment: dict[str, str] | None = None,
    completion: bool | None = False,
) -> Iterator[Scene]:
    """A scene with short patience; ``more`` gives further lines for the table [registry]."""
    root = Path("/var/tmp") / f"ember-{directory.name}-{os.getpid()}"
    fetch = f'log_level = "{level}"\n[fetch]\nmiss_timeout = {miss_s}\nreadahead = 0\n'
    registry = f"[registry]\nread_timeout = 2\n{more(directory)}"
    try:
        # Requests are counted, and faults are meant for readers.
        with node_on(directory, root, fetch + registry, environment, completion=completion) as node:
            registries = Registries(node.bed.name)
            made = Scene(node, registries)
            yield made
            registries.do(made.registry.stop())
            registries.stop()
    finally:
        _remove(root)


def _remove(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with contextlib.suppress(OSError):
        root.rmdir()


def noise_blobs(name: str, size: int = 300_000) -> tuple[list[Blob], dict[str, Any]]:
    """A gzip and a plain layer with a file of noise each, and what they show."""
    files = {f"{name}-{n}": random.Random(f"{name}{n}").randbytes(size) for n in range(2)}
    plains = [layer(file(key.encode(), data)) for key, data in files.items()]
    rows = {key: is_file(data) for key, data in files.items()}
    return [gzipped(plains[0]), as_it_is(plains[1])], rows


def noisy(name: str, size: int = 300_000) -> ImageCase:
    blobs, rows = noise_blobs(name, size)
    return image(name, blobs, rows)


def of_many_files(name: str) -> ImageCase:
    """A gzip and a plain layer of some files each, between which nothing is shared."""
    files = {f"{name}-{n}": random.Random(f"{name}{n}").randbytes(100_000) for n in range(16)}
    names = sorted(files)
    parts = [b"".join(file(key.encode(), files[key]) for key in names[at::2]) for at in range(2)]
    blobs = [gzipped(layer(parts[0])), as_it_is(layer(parts[1]))]
    return image(name, blobs, {key: is_file(data) for key, data in files.items()})


def read_all(scene: Scene, case: ImageCase, root: Path, limit_s: float = 40) -> list[str]:
    """What a reader of each file says: "" for right bytes."""
    readers = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
    return [ended_well(process, limit_s) for process in readers]


def quick(process: subprocess.Popen[str], limit_s: float) -> bool:
    """Whether the reader ends well in so short a time; it is left alone if not."""
    return until(lambda: process.poll() is not None, limit_s) and process.poll() == 0
