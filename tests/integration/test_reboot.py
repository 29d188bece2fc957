"""A reboot, as far as it can be had: every process of the node gone, what is of a boot wiped.

Containers, shims, containerd, daemon and keeper are killed, everything that is mounted goes, the
page cache too, the presence files are of another boot that did not end in order. What was here is
here again without any registry; what was not comes when the registry is back.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.bed import drop_page_cache
from bench.bed.leftovers import mounts_below, processes_naming
from ioengine.mounts import unmount
from snapshotter.chunks.presence import boot_id, read_presence
from tests.cases.images import ImageCase
from tests.containers import (
    Container,
    as_after_a_power_loss,
    build_program,
    container,
    crc_of,
    reading_image,
    told,
)
from tests.node import Node, node

pytestmark = [pytest.mark.root, pytest.mark.containerd]

NAME = "rebooted"
ANOTHER_BOOT = bytes(16)
FLUSH = {"cache": {"flush_interval": 0.2}, "fetch": {"readahead": 0}}


@pytest.fixture(params=[1, 2], ids=["containerd1", "containerd2"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    # Chunks are counted.
    with node(tmp_path, major=request.param, sections=FLUSH, completion=False) as made:
        yield made


def bring_lazily(at: Node, program: bytes) -> ImageCase:
    """An image whose index is here and none of whose bytes are."""
    case = reading_image(program, NAME)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    assert at.until(lambda: not at.drop(case.reference).kept)
    return case


def chunks(at: Node, boot: bytes) -> int:
    """How many chunks a daemon in ``boot`` believes to be here."""
    paths = (at.ember.root / "presence").iterdir()
    return sum(int.from_bytes(read_presence(path, boot)[1], "little").bit_count() for path in paths)


def power_off(at: Node) -> None:
    """Kill every process of this node but its registry, and take away what no boot outlives."""
    at.ember.kill()
    at.containerd.kill()
    own = {str(at.ember.state), str(at.containerd.directory)}
    for directory in sorted(own):
        for pid in processes_naming(Path(directory)):
            os.kill(pid, signal.SIGKILL)
    for points in (mounts_below(Path(directory)) for directory in sorted(own)):
        for point in points:
            unmount(Path(point), detach=True)
    shutil.rmtree(at.ember.state)
    shutil.rmtree(at.containerd.directory / "state")
    as_after_a_power_loss(at.ember.root)
    drop_page_cache()


def power_on(at: Node) -> None:
    at.containerd.start()
    at.start_again()


def test_after_a_reboot_what_was_here_needs_no_registry_and_the_rest_comes_with_it(
    at: Node, tmp_path: Path
) -> None:
    case = bring_lazily(at, build_program(tmp_path))
    runs = Container(at, case.reference)
    assert runs.read("/f0") == crc_of(NAME, 0)
    assert at.until(lambda: chunks(at, ANOTHER_BOOT) == chunks(at, boot_id()))
    before = at.image(case.reference)
    assert 0 < before["here_bytes"] < before["plain_bytes"]
    power_off(at)
    at.bed.registry.stop()
    power_on(at)
    after = at.image(case.reference)
    assert after["suspect"] == ""
    assert after["here_bytes"] == before["here_bytes"]
    with container(at, case.reference) as again:
        assert again.read("/f0") == crc_of(NAME, 0)
        waiting = again.begin("/f1")
        assert at.until(lambda: at.status()["guard"]["outstanding"] > 0)
        assert waiting.poll() is None
        assert at.status()["tiers"].get("registry", 0) == 0
        assert again.read("/f0") == crc_of(NAME, 0)
        at.bed.registry.start()
        assert told(waiting) == crc_of(NAME, 1)
        assert again.read("/f2") == crc_of(NAME, 2)
