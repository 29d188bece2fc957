"""The whole daemon against a registry that misbehaves while containers read.

Each fault is switched on under a mounted lazy image. What must hold each time: right bytes or an
error that names view, range and reason, within its bound; and the same mount reads right once the
registry is well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cases.images import OCI, ImageCase, as_it_is, digest, gzipped, image
from tests.cases.layers import is_file
from tests.cases.tars import file, layer
from tests.fakes.gates import BasicGate, Storage, TokenGate
from tests.fakes.registry import (
    Change,
    FakeRegistry,
    answer_with,
    cut,
    flip,
    header,
    is_blob,
    is_range,
)
from tests.integration.test_daemon_manners import node_on
from tests.integration.test_node_faults import ended_well, reader, sha256_of
from tests.node import Node

pytestmark = [pytest.mark.root, pytest.mark.containerd]

T = TypeVar("T")
MISS_S = 4.0
CLONE_NEWNET = 0x40000000


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

    def start(self) -> FakeRegistry:
        registry = FakeRegistry()
        self.do(registry.start())
        return registry

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def push(registry: FakeRegistry, case: ImageCase) -> str:
    """Add the image; returns its reference."""
    for content in case.contents:
        registry.add_blob(case.repository, content)
    for n, document in enumerate(case.documents):
        tag = "1" if n == len(case.documents) - 1 else None
        registry.add_manifest(case.repository, document, f"{OCI}.manifest.v1+json", tag)
    return f"{registry.authority}/{case.repository}:1"


class Scene:
    """A node with a registry that can be made to misbehave."""

    def __init__(self, node: Node, registries: Registries) -> None:
        self.node = node
        self.registries = registries
        self.registry = registries.start()

    def lazily(self, case: ImageCase) -> str:
        """Have the image's index here and none of its bytes."""
        reference = push(self.registry, case)
        assert self.node.pull(reference).lazy_layers == 2
        with self.node.mounted(case.chain_id):
            pass
        assert not self.node.drop(reference).kept
        self.registry.seen.clear()
        return reference

    def log_since(self, mark: int) -> str:
        return self.node.ember.log()[mark:]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("registry-faults")
    root = Path("/var/tmp") / f"ember-faults-{os.getpid()}"
    more = f"[fetch]\nmiss_timeout = {MISS_S}\nreadahead = 0\n[registry]\nread_timeout = 2\n"
    try:
        with node_on(directory, root, more) as node:
            registries = Registries(node.bed.name)
            made = Scene(node, registries)
            yield made
            registries.do(made.registry.stop())
            registries.stop()
    finally:
        leftovers(root)


def leftovers(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with contextlib.suppress(OSError):
        root.rmdir()


@pytest.fixture(autouse=True)
def well_again(scene: Scene) -> Iterator[None]:
    scene.registry.gate = None
    yield
    scene.registry.heal()
    scene.registry.gate = None


def noisy(name: str, size: int = 300_000) -> ImageCase:
    files = {f"{name}-{n}": random.Random(f"{name}{n}").randbytes(size) for n in range(2)}
    plains = [layer(file(key.encode(), data)) for key, data in files.items()]
    rows = {key: is_file(data) for key, data in files.items()}
    return image(name, [gzipped(plains[0]), as_it_is(plains[1])], rows)


def read_all(scene: Scene, case: ImageCase, root: Path, limit_s: float = 40) -> list[str]:
    readers = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
    return [ended_well(process, limit_s) for process in readers]


PASSING: dict[str, tuple[Change, int]] = {
    "429 with Retry-After": (answer_with(429, ("Retry-After", "1")), 2),
    "429 without Retry-After": (answer_with(429), 2),
    "503 with Retry-After": (answer_with(503, ("Retry-After", "1")), 2),
    "503 without Retry-After": (answer_with(503), 3),
    "500": (answer_with(500), 3),
    "short body": (cut(1000), 3),
    "reset in mid-body": (cut(1000, "reset"), 3),
    "no answer at all": (cut(-1), 3),
    "hang before the body": (cut(0, "hang"), 1),
    "hang in mid-body": (cut(1000, "hang"), 1),
    "206 without Content-Range": (header("Content-Range", None), 3),
    "206 with a lying Content-Range": (header("Content-Range", "bytes 0-9/10"), 3),
    "a flipped byte": (flip(100), 2),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_costs_readers_time_and_no_error(scene: Scene, fault: str) -> None:
    change, times = PASSING[fault]
    case = noisy("passing " + fault)
    scene.lazily(case)
    scene.registry.inject(change, is_range, times)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]


LASTING: dict[str, Change] = {
    "wrong bytes": flip(100),
    "server errors": answer_with(500),
    "short bodies": cut(10),
    "hangs": cut(0, "hang"),
}


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_is_an_error_with_its_reason_and_heals_in_the_same_mount(
    scene: Scene, fault: str
) -> None:
    case = noisy("lasting " + fault)
    scene.lazily(case)
    scene.registry.inject(LASTING[fault], is_blob)
    mark = len(scene.node.ember.log())
    with scene.node.mounted(case.chain_id) as root:
        began_s = time.monotonic()
        said = read_all(scene, case, root)
        assert time.monotonic() - began_s < 2.5 * MISS_S
        assert all("Input/output error" in each for each in said), said
        log = scene.log_since(mark)
        assert re.search(r"a reader of view sha256:[0-9a-f]{64} gets an error for bytes \d+", log)
        assert "registry" in log
        scene.registry.heal()
        assert scene.node.until(lambda: read_all(scene, case, root) == ["", ""], 40)


def test_a_whole_body_for_a_range_is_used_as_one_stream_and_never_as_the_range(
    scene: Scene,
) -> None:
    case = noisy("rangeless")
    scene.lazily(case)

    def whole(seen: Any, answer: Any) -> Any:
        found = scene.registry.repositories[case.repository].blobs
        data = found[seen.path.rpartition("/")[2]]
        return replace(answer, status=200, headers=[], body=data)

    scene.registry.inject(whole, is_range)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
    assert len(scene.registry.asked("/blobs/")) <= 12


def test_a_400_to_every_range_ends_in_one_stream_and_no_storm(scene: Scene) -> None:
    case = noisy("ranges refused")
    scene.lazily(case)
    scene.registry.inject(answer_with(400), is_range)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
    assert len(scene.registry.asked("/blobs/")) <= 30


def test_no_blob_is_ever_asked_for_with_head(scene: Scene) -> None:
    case = noisy("heads")
    scene.registry.inject(answer_with(403), lambda seen: seen.method == "HEAD")
    scene.lazily(case)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
    assert not [seen for seen in scene.registry.seen if seen.method == "HEAD"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_expires_between_two_reads_is_renewed(scene: Scene, status: int) -> None:
    gate = TokenGate(scene.registry, status=status)
    case = noisy(f"expiring {status}")
    scene.lazily(case)
    first, second = sorted(case.rows)
    with scene.node.mounted(case.chain_id) as root:
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""
        gate.revoke()
        before = gate.tokens
        assert ended_well(reader(root / second, sha256_of(case, second))) == ""
        assert gate.tokens == before + 1


def test_a_redirect_to_a_storage_host_keeps_authorization_at_home_and_outlives_its_signature(
    scene: Scene,
) -> None:
    case = noisy("redirected")
    TokenGate(scene.registry)
    storage_server = scene.registries.start()
    try:
        for content in case.contents:
            storage_server.add_blob(case.repository, content)
        storage = Storage(storage_server)
        storage.serve_for(scene.registry)
        scene.lazily(case)
        first, second = sorted(case.rows)
        with scene.node.mounted(case.chain_id) as root:
            assert ended_well(reader(root / first, sha256_of(case, first))) == ""
            storage.expire()
            assert ended_well(reader(root / second, sha256_of(case, second))) == ""
        assert storage_server.seen
        assert not [seen for seen in storage_server.seen if "authorization" in seen.headers]
    finally:
        scene.registries.do(storage_server.stop())


def test_an_image_that_ember_has_no_credentials_for_is_left_to_containerd_and_said_so(
    scene: Scene,
) -> None:
    case = noisy("private")
    push(scene.registry, case)
    scene.registry.gate = BasicGate({"user": "pass:word"})
    with pytest.raises(Exception, match=r"(?i)401|credential|unauthori"):
        scene.node.pull(f"{scene.registry.authority}/{case.repository}:1")


def test_a_blob_that_is_gone_leaves_what_is_here_and_names_what_is_not(scene: Scene) -> None:
    case = noisy("gone", size=1_000_000)
    scene.lazily(case)
    first, second = sorted(case.rows)
    with scene.node.mounted(case.chain_id) as root:
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""
        scene.registry.repositories[case.repository].blobs.clear()
        mark = len(scene.node.ember.log())
        assert "Input/output error" in ended_well(reader(root / second, sha256_of(case, second)))
        assert re.search(r"(?i)404|not found|unknown", scene.log_since(mark))
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""


def test_a_registry_that_is_down_and_up_again_costs_time_only(scene: Scene) -> None:
    case = noisy("down")
    scene.lazily(case)
    scene.registries.do(scene.registry.stop())
    with scene.node.mounted(case.chain_id) as root:
        waiting = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
        time.sleep(1.5)
        scene.registries.do(scene.registry.start())
        assert [ended_well(process) for process in waiting] == ["", ""]


def test_a_hang_of_one_layer_holds_up_nobody_else(scene: Scene) -> None:
    case = noisy("half hanging")
    scene.lazily(case)
    hanging = digest(case.contents[0])
    stored = {digest(content): content for content in case.contents}
    assert hanging in stored
    scene.registry.inject(cut(0, "hang"), lambda seen: is_range(seen) and hanging in seen.target)
    with scene.node.mounted(case.chain_id) as root:
        processes = {name: reader(root / name, sha256_of(case, name)) for name in case.rows}
        began_s = time.monotonic()
        done = [name for name in processes if quick(processes[name], 2.0)]
        assert done, "nobody was served while one layer hung"
        assert time.monotonic() - began_s < 5
        scene.registry.heal()
        assert [ended_well(processes[name]) for name in processes if name not in done] in (
            [""],
            [],
        )


def quick(process: Any, limit_s: float) -> bool:
    """Whether the reader ends well in so short a time; it is left alone if not."""
    deadline_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return process.poll() == 0


LIES: dict[str, Callable[[Scene, ImageCase], None]] = {
    "a blob that lies about its digest": lambda scene, case: scene.registry.inject(
        flip(50), lambda seen: is_blob(seen) and digest(case.contents[0]) in seen.target
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_first_pull_of_a_lie_shows_nothing_and_works_once_it_is_true(
    scene: Scene, lie: str
) -> None:
    case = noisy(lie)
    reference = push(scene.registry, case)
    LIES[lie](scene, case)
    with pytest.raises(Exception, match=r"(?i)digest|corrupt|does not|refused|size|bytes"):
        scene.node.pull(reference)
        with scene.node.mounted(case.chain_id):
            pass
    scene.registry.heal()
    scene.node.pull(reference)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
