"""EROFS and plain overlay layers in one chain, deep chains, several namespaces, many clients.

Whether a layer is lazy is chosen by how it is pulled: `ember pull` sends the labels that let Ember
take it, Debian's `ctr images pull` does not. Whatever the mixture, the truth is the same.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.bed.link import Shape
from bench.bed.tiny import tiny_image
from tests.cases.images import Blob, ImageCase, gzipped, image
from tests.cases.rows import LayerCase, is_file
from tests.cases.stacks import implied_parents, replaced_across_layers, usrmerge, whiteouts
from tests.cases.tars import file, layer
from tests.node import Node, node
from tests.treecheck import CONTAINERD_DEPARTURES, compare, directory_sizes

pytestmark = [pytest.mark.root, pytest.mark.containerd]

CLIENTS = 20
CASES = [usrmerge(), implied_parents(), whiteouts(), replaced_across_layers()]
PATTERNS = ["lazy plain lazy", "plain lazy plain", "plain plain lazy", "lazy lazy plain"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("cache")) as made:
        yield made


def stack_of(case: LayerCase, name: str) -> tuple[list[Blob], ImageCase]:
    """The case's layers on one of our own, none of them shared with any other test's."""
    unlike = bytes(512 * (len(name) + 7 * PATTERNS.index(name.rpartition(" as ")[2])))
    blobs = [gzipped(plain + unlike) for plain in case.layers]
    blobs.insert(0, gzipped(layer(file(b"stack", name.encode()))))
    return blobs, image(name, blobs, {**case.rows, "stack": is_file(name.encode())})


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_chain_of_lazy_and_plain_layers_shows_the_truth(
    case: LayerCase, pattern: str, ours: Node
) -> None:
    name = f"{case.name} as {pattern}"
    blobs, whole = stack_of(case, name)
    lazy: list[str] = []
    parts = [image(f"{name} {n}", blobs[:n]) for n in range(1, len(blobs))] + [whole]
    for part, way in zip(parts, itertools.cycle(pattern.split()), strict=False):
        part.push(ours.bed.registry)
        if way == "lazy":
            ours.pull(part.reference)
            lazy.append(part.reference)
        else:
            ours.containerd.pull(part.reference, "ember")
    check_both_kinds(ours, whole)
    for reference in lazy[:-1]:
        ours.remove(reference)  # what others stand on is kept
    if way == "plain":
        ours.remove(lazy[-1])
    assert ours.drop(lazy[-1]).kept == []
    check_both_kinds(ours, whole)


def check_both_kinds(ours: Node, case: ImageCase) -> None:
    for writable in (False, True):
        shown = ours.shown(case.chain_id, writable=writable)
        assert compare(case.rows, shown, CONTAINERD_DEPARTURES) == []
    assert 0 < erofs_below(ours, case) < len(case.stored)


def erofs_below(ours: Node, case: ImageCase) -> int:
    """How many layers of the chain are EROFS mounts; the others are directories."""
    with ours.mounted(case.chain_id) as root:
        table = Path("/proc/self/mountinfo").read_text()
        line = next(line for line in table.splitlines() if f" {root} " in line)
        lower = re.search(r"lowerdir=([^, ]+)", line)
        assert lower
        snapshots = ours.ember.root / "snapshots"
        return sum((snapshots / path).is_symlink() for path in lower[1].split(":"))


def test_a_container_starts_on_128_layers_first_and_lazily(ours: Node, tmp_path: Path) -> None:
    tiny = tiny_image(tmp_path, layers=1)
    program = Blob(tiny_layer(tiny.folder, tiny.layers[0].digest), tiny.layers[0].diff_id)
    many = [gzipped(layer(file(b"n/%d" % n, b"%d" % n))) for n in range(127)]
    case = image("128 layers", [program, *many], config={"Cmd": ["/program"]})
    case.push(ours.bed.registry)
    for _ in ("first", "lazily"):
        assert ours.pull(case.reference).lazy_layers == 128
        ours.containerd.start_container(case.reference, snapshotter="ember", timeout_s=60)
        shown = ours.shown(case.chain_id)
        assert {f"n/{n}" for n in range(127)} <= shown.keys()
        assert ours.drop(case.reference).kept == []


def tiny_layer(folder: Path, name: str) -> bytes:
    return (folder / "blobs" / "sha256" / name.removeprefix("sha256:")).read_bytes()


def test_two_namespaces_share_layers_and_neither_needs_the_other(ours: Node) -> None:
    case = of_noise("two namespaces", 400_000, 300_000)
    case.push(ours.bed.registry)
    registry, other = ours.bed.registry, f"{ours.namespace}-other"
    before = registry.sent_bytes()
    for namespace in (ours.namespace, other):
        assert ours.pull(case.reference, namespace).lazy_layers == 2
        assert differences(ours, case, namespace=namespace) == []
    assert registry.sent_bytes() - before < 1.1 * 700_000
    ours.drop(case.reference)
    with ours.mounted(case.chain_id, namespace=other) as root:
        ours.containerd.remove_image(case.reference)
        assert (root / "f0").read_bytes() == noise("two namespaces0", 400_000)
    assert differences(ours, case, namespace=other) == []
    assert ours.pull(case.reference).lazy_layers == 2
    assert differences(ours, case) == []


def test_twenty_clients_at_once_see_the_same_and_share_what_is_fetched(ours: Node) -> None:
    case = of_noise("twenty clients", 1_500_000, 700_000, 300_000)
    case.push(ours.bed.registry)
    size = sum(len(data) for data in case.contents)
    with ThreadPoolExecutor(CLIENTS) as clients:
        for _ in ("first", "lazily"):
            before = ours.bed.registry.sent_bytes()
            pulled = list(clients.map(lambda _: ours.pull(case.reference), range(CLIENTS)))
            assert {each.lazy_layers for each in pulled} == {3}
            found = clients.map(lambda _: differences(ours, case), range(CLIENTS))
            assert list(found) == [[]] * CLIENTS
            assert ours.bed.registry.sent_bytes() - before < 3 * size + CLIENTS * 20_000
            ours.drop(case.reference)


def test_a_container_waits_for_a_first_pull_that_is_still_streaming(
    ours: Node, tmp_path: Path
) -> None:
    tiny = tiny_image(tmp_path, bytes_each=2_000_000, layers=2)
    tiny.push(ours.bed.registry)
    ours.bed.link.reshape(Shape(8))
    try:
        began_s = time.monotonic()
        assert ours.pull(tiny.reference).lazy_layers == 2
        assert time.monotonic() - began_s < 2
        assert ours.status()["indexing"]
        progress: set[int] = set()
        over = threading.Event()
        watcher = threading.Thread(target=watch_progress, args=(ours, progress, over))
        watcher.start()
        try:
            ours.containerd.start_container(tiny.reference, snapshotter="ember", timeout_s=60)
        finally:
            over.set()
            watcher.join()
        assert time.monotonic() - began_s > 3
        assert len(progress) > 2, "status shows no progress"
    finally:
        ours.bed.link.reshape(Shape(0))


def watch_progress(ours: Node, progress: set[int], over: threading.Event) -> None:
    while not over.wait(0.2):
        progress.update(job["percent"] for job in ours.status()["indexing"])


def noise(seed: str, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def of_noise(name: str, *sizes: int) -> ImageCase:
    files = {f"f{n}": noise(f"{name}{n}", size) for n, size in enumerate(sizes)}
    blobs = [gzipped(layer(file(path.encode(), data))) for path, data in files.items()]
    return image(name, blobs, {path: is_file(data) for path, data in files.items()})


def differences(ours: Node, case: ImageCase, namespace: str = "") -> list[str]:
    shown = ours.shown(case.chain_id, namespace=namespace)
    return compare(case.rows, shown, (directory_sizes,))
