"""The whole daemon against a registry that misbehaves while containers read.

Each fault is switched on under a mounted lazy image. What must hold each time: right bytes or an
error that names view, range and reason, within its bound; and the same mount reads right once the
registry is well again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.images import ImageCase, as_it_is, digest, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.fakes.gates import TokenGate
from tests.fakes.http_server import Seen
from tests.fakes.registry import Change, answer_with, cut, flip, header, is_blob, is_range
from tests.integration.registry_scene import (
    MISS_S,
    Scene,
    noisy,
    quick,
    read_all,
    scene_in,
)
from tests.patience import until
from tests.readers import ended_well, noise, reader, sha256_of, told_of_waiting

pytestmark = [pytest.mark.root, pytest.mark.containerd]

PAGE = "import os, sys; os.pread(os.open(sys.argv[1], os.O_RDONLY), 4096, int(sys.argv[2]))"
HEADER_BYTES = 512
"""A tar header: where the first file of a plain layer begins in its view."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("registry-faults")) as made:
        yield made


@pytest.fixture(autouse=True)
def well_again(scene: Scene) -> Iterator[None]:
    scene.registry.gate = None
    yield
    scene.registry.heal()
    scene.registry.gate = None


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
    "206 of another length": (header("Content-Range", "bytes 0-9/9"), 2),
    "an encoded body": (header("Content-Encoding", "gzip"), 2),
    "a redirect to nowhere": (answer_with(307), 2),
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
        complaints = scene.complaints(mark)
        assert len({complaint.view for complaint in complaints}) == 2
        assert all("registry" in complaint.why for complaint in complaints)
        scene.registry.heal()
        assert scene.node.until(lambda: read_all(scene, case, root) == ["", ""], 40)


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


def test_a_registry_that_is_down_and_up_again_costs_time_only(scene: Scene) -> None:
    case = noisy("down")
    scene.lazily(case)
    scene.registries.do(scene.registry.stop())
    with scene.node.mounted(case.chain_id) as root:
        waiting = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
        assert until(lambda: "registry" in told_of_waiting(scene.node))
        scene.registries.do(scene.registry.start())
        assert [ended_well(process) for process in waiting] == ["", ""]


def three_files(name: str) -> ImageCase:
    """A gzip layer with one file, and a plain one with two that share no chunk."""
    one, two, other = (noise(n, 300_000) for n in range(3))
    below = layer(file(b"below", other))
    above = layer(file(b"first", one), file(b"between", bytes(256 * 1024)), file(b"last", two))
    rows = {"below": is_file(other), "first": is_file(one), "last": is_file(two)}
    return image(name, [gzipped(below), as_it_is(above)], rows)


def test_a_hang_holds_up_only_the_reads_that_need_it(scene: Scene) -> None:
    case = three_files("hanging in part")
    scene.lazily(case)
    above = digest(case.contents[1])

    def in_first(seen: Seen) -> bool:
        start = int(seen.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        return is_range(seen) and above in seen.target and start < 300_000

    scene.registry.inject(cut(0, "hang"), in_first)
    with scene.node.mounted(case.chain_id) as root:
        waits = reader(root / "first", sha256_of(case, "first"))
        assert until(lambda: any(map(in_first, scene.registry.seen)))
        others = [reader(root / name, sha256_of(case, name)) for name in ("below", "last")]
        assert [quick(process, 2.0) for process in others] == [True, True]
        assert waits.poll() is None
        scene.registry.heal()
        assert ended_well(waits) == ""


def page(path: Path, offset: int) -> subprocess.Popen[str]:
    """A process that reads one page."""
    words = [sys.executable, "-c", PAGE, str(path), str(offset)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def test_every_read_that_fails_is_named_with_its_view_range_and_reason(scene: Scene) -> None:
    case = noisy("failing in many places", size=1_000_000)
    scene.lazily(case)
    scene.registry.inject(answer_with(500), is_blob)
    mark = len(scene.node.ember.log())
    name = sorted(case.rows)[1]  # of the plain layer, whose view is the tar as it is
    view = digest(case.contents[1])
    offsets = (0, 300_000, 600_000, 900_000)
    with scene.node.mounted(case.chain_id) as root:
        reads = [page(root / name, offset) for offset in offsets]
        assert all("Input/output error" in ended_well(read, 2.5 * MISS_S) for read in reads)
        ours = [complaint for complaint in scene.complaints(mark) if complaint.view == view]
        for offset in offsets:
            at = HEADER_BYTES + offset
            mine = [complaint for complaint in ours if complaint.start <= at < complaint.end]
            assert mine, f"no line for the read at {offset}"
            assert all("500" in complaint.why for complaint in mine)


def test_a_first_pull_of_a_lie_shows_nothing_and_works_once_it_is_true(scene: Scene) -> None:
    case = noisy("a blob that lies about its digest")
    reference = scene.add(case)
    lies = digest(case.contents[0])
    scene.registry.inject(flip(50), lambda seen: is_blob(seen) and lies in seen.target)
    with pytest.raises(Exception, match=r"(?i)digest|corrupt|does not|refused|size|bytes"):
        scene.node.pull(reference)
        with scene.node.mounted(case.chain_id):
            pass
    scene.registry.heal()
    scene.node.pull(reference)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
