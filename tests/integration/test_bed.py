"""The test bed does what the measurements rely on: rate, delay, counting, and leaving nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import BASE, Bed
from bench.bed.image import Image
from bench.bed.leftovers import cgroups, mounts_below, processes_in_cgroups, processes_naming, sweep
from bench.bed.link import NAMESPACES, Shape
from bench.bed.process import BedError, run
from bench.bed.tiny import tiny_image
from tests.patience import until

pytestmark = [pytest.mark.root, pytest.mark.containerd]
ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import sys, time
from pathlib import Path
from bench.bed.bed import Bed
from bench.bed.image import load
from bench.bed.link import Shape
image = load("bed/tiny", "gzip", Path(sys.argv[1]))
with Bed(Shape(0), cache=Path(sys.argv[2])) as bed:
    image.push(bed.registry)
    containerd = bed.containerd()
    containerd.pull(image.reference)
    print(bed.name, flush=True)
    containerd.start_container(image.reference, ["/program", "wait"])
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return tiny_image(tmp_path_factory.mktemp("image"), bytes_each=4_000_000)


@pytest.fixture
def bed(tmp_path: Path, image: Image, request: pytest.FixtureRequest) -> Iterator[Bed]:
    shape: Shape = getattr(request, "param", Shape(0))
    with Bed(shape, cache=tmp_path) as made:
        image.push(made.registry)
        yield made


def traces(name: str) -> list[str]:
    """What is left of a bed on this machine."""
    directory = BASE / name
    left = [f"process {pid}" for pid in processes_naming(directory)]
    left += [f"process {pid}" for pid in processes_in_cgroups(name)]
    left += [str(path) for path in cgroups(name)]
    left += mounts_below(directory)
    return left + [str(p) for p in (directory, NAMESPACES / name) if p.exists()]


def fetch(bed: Bed, path: str) -> tuple[float, int]:
    """GET over the link; seconds and bytes of the body."""
    words = ["curl", "-sf", "-o", "/dev/null", "-w", "%{time_total} %{size_download}"]
    seconds, size = run([*bed.link.enter(), *words, f"http://localhost:5000{path}"]).split()
    return float(seconds), int(size)


@pytest.mark.parametrize("major", [1, 2])
def test_a_container_starts_through_overlayfs(bed: Bed, image: Image, major: int) -> None:
    containerd = bed.containerd(major)
    before = bed.registry.sent_bytes()
    containerd.pull(image.reference)
    sent = bed.registry.sent_bytes() - before
    assert image.size < sent < image.size + 10_000
    assert containerd.start_container(image.reference).output == "ready\n"
    containerd.remove_image(image.reference)
    assert containerd.holds_nothing()


@pytest.mark.parametrize("bed", [Shape(80)], indirect=True)
def test_the_link_has_the_rate_that_was_asked_for(bed: Bed, image: Image) -> None:
    layer = max(image.layers, key=lambda layer: layer.size)
    counted = bed.link.sent_bytes()
    seconds, size = fetch(bed, f"/v2/{image.name}/blobs/{layer.digest}")
    assert size == layer.size
    assert 0.85 < (size - 256 * 1024) / bed.link.shape.bytes_per_s / seconds < 1.1
    assert size < bed.link.sent_bytes() - counted < size * 1.1


@pytest.mark.parametrize("bed", [Shape(0, delay_ms=40)], indirect=True)
def test_the_relay_delays_both_ways(bed: Bed) -> None:
    seconds, _ = fetch(bed, "/v2/")
    # The connection's own round trip (one delay here) and that of the request.
    assert 0.12 <= seconds < 0.3


@pytest.mark.parametrize("bed", [Shape(0, delay_ms=10)], indirect=True)
def test_delay_does_not_limit_the_rate(bed: Bed, image: Image) -> None:
    layer = max(image.layers, key=lambda layer: layer.size)
    seconds, size = fetch(bed, f"/v2/{image.name}/blobs/{layer.digest}")
    assert size / seconds > 20_000_000


def test_a_bed_leaves_nothing_behind(bed: Bed, image: Image) -> None:
    containerd = bed.containerd()
    containerd.pull(image.reference)
    with pytest.raises(BedError, match="ended with"):
        containerd.start_container(image.reference, ["/program", "wait"], timeout_s=2)
    assert traces(bed.name)
    bed.close()
    assert traces(bed.name) == []


def test_a_bed_that_was_killed_is_cleared_by_the_next(tmp_path: Path, image: Image) -> None:
    words = [sys.executable, "-c", KILLED, str(image.folder.parent), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert until(lambda: bool(list(processes_in_cgroups(name))))
        assert name not in sweep(BASE), "a bed in use was cleared"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert name in sweep(BASE)
    assert traces(name) == []


def test_a_directory_that_containers_cannot_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BedError, match="is on tmpfs"), Bed(base=Path("/dev/shm/bed")):
        raise AssertionError("a bed on tmpfs was made")
