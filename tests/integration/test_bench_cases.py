"""A measurement that is told to end leaves nothing; crowds and peers begin and end as they say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import BASE, Bed
from bench.bed.image import Image
from bench.bed.leftovers import cgroups, mounts_below, processes_in_cgroups, processes_naming
from bench.bed.link import NAMESPACES, Shape
from bench.bed.parallel import download
from bench.bed.process import BedError
from bench.bed.tiny import tiny_image
from bench.consumption import family
from bench.crowd import Crowd
from tests.patience import until

pytestmark = [pytest.mark.root, pytest.mark.containerd]
ROOT = Path(__file__).resolve().parents[2]
BED = re.compile(rf"{BASE}/(ember-[0-9a-f]+)/containerd")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return tiny_image(tmp_path_factory.mktemp("image"), bytes_each=9_000_000)


@pytest.fixture
def bed(tmp_path: Path, image: Image) -> Iterator[Bed]:
    with Bed(Shape(0), cache=tmp_path) as made:
        image.push(made.registry)
        yield made


def bed_of(pid: int) -> str:
    """The name of the bed whose containerd this process started; empty while there is none."""
    for child in family(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_text()
        except OSError:
            continue
        if found := BED.search(words):
            return found[1]
    return ""


def traces(name: str) -> list[str]:
    """What is left of a bed on this machine."""
    directory = BASE / name
    left = [f"process {pid}" for pid in processes_naming(directory)]
    left += [f"process {pid}" for pid in processes_in_cgroups(name)]
    left += [str(path) for path in cgroups(name)]
    left += mounts_below(directory)
    return left + [str(p) for p in (directory, NAMESPACES / name) if p.exists()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_case_that_is_told_to_end_leaves_nothing(number: signal.Signals) -> None:
    words = [sys.executable, "-B", "-m", "bench", "scale-files", "--quick", "--points", "3000"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as run:
        assert until(lambda: bool(bed_of(run.pid)))
        name = bed_of(run.pid)
        assert traces(name)
        run.send_signal(number)
        run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert traces(name) == []


def test_a_crowd_is_ready_together_and_ends_together(bed: Bed, image: Image) -> None:
    containerd = bed.containerd(2)
    containerd.pull(image.reference)
    with Crowd(containerd, image.reference, "overlayfs") as crowd:
        seconds = crowd.start(3, ("/program", "stay"))
        assert seconds > 0
        assert len(containerd.ctr("tasks", "ls", "-q").split()) == 3
    assert containerd.ctr("tasks", "ls", "-q") == ""


def test_a_crowd_that_does_not_come_up_says_so(bed: Bed, image: Image) -> None:
    containerd = bed.containerd(2)
    containerd.pull(image.reference)
    with (
        pytest.raises(BedError, match="before it was ready"),
        Crowd(containerd, image.reference, "overlayfs") as crowd,
    ):
        crowd.start(2, ("/no-such-program",))


def test_the_bare_download_takes_every_byte_once(bed: Bed, image: Image) -> None:
    before = bed.registry.sent_bytes()
    assert download(bed.link, image, connections=3) > 0
    sent = bed.registry.sent_bytes() - before
    assert image.size < sent < image.size + 10_000


def test_the_bare_download_names_a_blob_that_is_not_there(bed: Bed, image: Image) -> None:
    bed.registry.stop()
    with pytest.raises(BedError, match=r"bench\.bed\.parallel"):
        download(bed.link, image)
