"""What the daemon takes while it has nothing to do, and how much it finds again after a crash."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed.crowd import Member, crowd, forget_bytes, noise, pull, stood_on
from bench.bed.footprint import own_bytes, switches, wakes
from ioengine.mounts import mountinfo
from tests.node import Node, node
from tests.patience import until, waits_for_bytes

pytestmark = [pytest.mark.root, pytest.mark.containerd]

IMAGES, LAYERS, BYTES = 10, 10, 20_000
WINDOW_S, WINDOWS = 4.0, 5
MOST_OF_ONE, MOST_OF_ALL = 6, 14
"""Wake-ups in a window: once a second, and as much again as that may be late or follow on it."""
MOST_BYTES = 120_000_000
READ_S = 60.0


@pytest.fixture(scope="module")
def members() -> list[Member]:
    return crowd(IMAGES, LAYERS, BYTES)


@pytest.fixture(scope="module")
def at(members: list[Member], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node on which all images are lazy, and nothing of them is here."""
    with node(tmp_path_factory.mktemp("cache"), completion=False) as made:
        for member in members:
            member.push(made.bed.registry)
        assert pull(made.ember, members) == IMAGES * LAYERS
        forget_bytes(made.ember, members)
        assert pull(made.ember, members) == IMAGES * LAYERS
        with stood_on(made.containerd, members):
            yield made


def layers(at: Node) -> list[Path]:
    below = at.ember.state / "layers"
    return [mount.target for mount in mountinfo() if mount.target.parent == below]


def woken(at: Node) -> dict[tuple[int, str], int]:
    """Wake-ups by thread in one window, in which the daemon does not end."""
    before = switches(at.ember.pid)
    assert not until(lambda: not Path(f"/proc/{at.ember.pid}").exists(), WINDOW_S)
    return wakes(before, switches(at.ember.pid))


def test_a_daemon_with_nothing_to_do_wakes_at_most_once_a_second(at: Node) -> None:
    assert len(layers(at)) == IMAGES * LAYERS
    seen = []
    for _ in range(WINDOWS):  # what was asked of it before may still be settling
        seen.append(woken(at))
        counts = seen[-1].values()
        if max(counts, default=0) <= MOST_OF_ONE and sum(counts) <= MOST_OF_ALL:
            break
    else:
        raise AssertionError(seen)
    assert own_bytes(at.ember.pid) <= MOST_BYTES


def test_every_lazy_layer_is_served_again_after_a_crash(at: Node) -> None:
    """A reader that was begun while no daemon was there goes on with the right bytes, in each."""
    files = [str(next(layer.glob("layer/f*"))) for layer in layers(at)]
    at.ember.kill()
    reading = subprocess.Popen(["sha256sum", *files], stdout=subprocess.PIPE, text=True)
    assert until(lambda: waits_for_bytes(reading.pid))
    at.start_again()
    said, _ = reading.communicate(timeout=READ_S)
    wanted = {
        hashlib.sha256(noise(number, layer, BYTES)).hexdigest()
        for number in range(IMAGES)
        for layer in range(LAYERS)
    }
    assert {line.split()[0] for line in said.splitlines()} == wanted
    assert len(layers(at)) == IMAGES * LAYERS
    assert not any(image["suspect"] for image in at.status()["images"])
