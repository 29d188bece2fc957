"""Real containers on lazy layers under the faults of a node: nothing that runs needs a daemon.

A container's program is asked again and again to read its image, and says what it saw. At the end
of each test the images are removed, and nothing of them may be left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from bench.bed.link import Shape
from bench.bed.process import BedError
from tests.cases.images import ImageCase
from tests.containers import (
    Container,
    build_program,
    container,
    crc_of,
    emptied,
    has_another_keeper,
    keepers,
    layer_mounts,
    left_behind,
    reading_image,
    told,
)
from tests.node import Node, node
from tests.patience import someone_waits_beside, until

pytestmark = [pytest.mark.root, pytest.mark.containerd]

SLOW = Shape(60)
Lazily = Callable[[str], ImageCase]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module", params=[1, 2], ids=["containerd1", "containerd2"])
def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    cache = tmp_path_factory.mktemp("cache")
    # Its tests take longer than completion's delay: a hole must be one until its reader comes.
    with node(cache, shape=SLOW, major=request.param, completion=False) as made:
        yield made


@pytest.fixture
def lazily(at: Node, program: bytes) -> Iterator[Lazily]:
    """Makes images whose index is here and none of whose bytes are."""
    made: list[str] = []

    def make(name: str) -> ImageCase:
        case = reading_image(program, name)
        made.append(case.reference)
        bring_lazily(at, case)
        return case

    yield make
    assert left_behind(at, *made) == []


def bring_lazily(at: Node, case: ImageCase) -> None:
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    assert not at.drop(case.reference).kept


def test_a_container_outlives_a_stop_and_a_crash_and_reads_on(at: Node, lazily: Lazily) -> None:
    case = lazily("outlives")
    with container(at, case.reference) as runs:
        pid, mounted = runs.pid, layer_mounts(at)
        assert runs.read("/f0") == crc_of("outlives", 0)
        at.ember.stop()
        assert runs.read("/f0") == crc_of("outlives", 0)  # was read before: needs nobody
        at.start_again()
        assert runs.read("/f1") == crc_of("outlives", 1)
        at.ember.kill()
        waiting = runs.begin("/f2")
        assert until(lambda: someone_waits_beside(pid))
        assert waiting.poll() is None
        at.start_again()
        assert told(waiting) == crc_of("outlives", 2)
        assert runs.pid == pid
        assert layer_mounts(at) == mounted
        assert at.image(case.reference)["suspect"] == ""
        assert any(runs.name in name for name in at.image(case.reference)["containers"])


def test_containerd_killed_and_restarted_leaves_lazy_containers_running(
    at: Node, lazily: Lazily
) -> None:
    case = lazily("redialled")
    with container(at, case.reference) as runs:
        pid = runs.pid
        waiting = runs.begin("/f0")
        at.containerd.kill()
        os.kill(pid, 0)
        told(waiting)  # its client went with containerd: all that counts is that it ends
        at.containerd.start()
        at.connect()
        assert runs.pid == pid
        assert runs.read("/f0") == crc_of("redialled", 0)
        at.containerd.stop()
        at.containerd.start()
        at.connect()
        assert runs.pid == pid
        assert runs.read("/f1") == crc_of("redialled", 1)
        with container(at, case.reference) as another:
            assert another.read("/f2") == crc_of("redialled", 2)


def test_an_image_that_is_removed_under_a_container_stays_as_long_as_that_runs(
    at: Node, lazily: Lazily
) -> None:
    case = lazily("removed")
    with container(at, case.reference) as runs:
        assert runs.read("/f0") == crc_of("removed", 0)
        for reply in (at.drop(case.reference), at.remove(case.reference)):
            assert reply.kept
            assert all("in use" in line or "is made of it" in line for line in reply.kept)
        assert runs.read("/f1") == crc_of("removed", 1)
        at.containerd.collect_garbage()
        assert at.image(case.reference)["leaving"]
        at.ember.kill()
        at.start_again()
        assert runs.read("/f2") == crc_of("removed", 2)
    assert at.until(lambda: not at.status()["images"] and not emptied(at), 20)


def test_a_layer_unmounted_while_a_read_waits_gives_its_bytes_and_goes(
    at: Node, lazily: Lazily
) -> None:
    case = lazily("unmounting")
    runs = Container(at, case.reference)
    at.ember.kill()
    try:
        waiting = runs.begin("/f0")
        assert until(lambda: someone_waits_beside(runs.pid))
        os.kill(runs.pid, signal.SIGKILL)  # takes the waiting read with it
        assert told(waiting) != crc_of("unmounting", 0)
    finally:
        at.start_again()
        runs.remove()
    with container(at, case.reference) as another:
        assert another.read("/f0") == crc_of("unmounting", 0)


def test_garbage_is_collected_while_a_container_waits_for_its_first_pull(
    at: Node, lazily: Lazily, program: bytes
) -> None:
    other = lazily("garbage")
    case = reading_image(program, "preparing", size=1_500_000)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(Container, at, case.reference)
        for _ in range(3):
            at.containerd.collect_garbage()
        at.containerd.remove_image(other.reference)
        runs = starting.result(60)
    try:
        at.containerd.collect_garbage()
        assert runs.read("/f0") == crc_of("preparing", 0, 1_500_000)
    finally:
        runs.remove()
        at.remove(case.reference)


def test_a_pull_killed_with_its_daemon_again_and_again_works_in_the_end(
    at: Node, lazily: Lazily, program: bytes
) -> None:
    lazily("beside")
    case = reading_image(program, "pulled", size=1_000_000)
    case.push(at.bed.registry)
    with ThreadPoolExecutor(1) as pool:
        for begun in (lambda: True, lambda: bool(leases(at)), lambda: indexes(at, case)):
            pulling = pool.submit(at.ember.pull, case.reference)
            assert until(partial(either, begun, pulling.done))
            at.ember.kill()
            try:
                pulling.result(60)
            except BedError as error:
                assert "Traceback" not in str(error)
            at.start_again()
    assert at.ember.pull(case.reference) < 30
    with container(at, case.reference) as runs:
        assert runs.read("/f0") == crc_of("pulled", 0, 1_000_000)
    assert at.until(lambda: not leases(at), 10)
    at.containerd.remove_image(case.reference)
    assert at.remove(case.reference).kept == []


def either(one: Callable[[], bool], other: Callable[[], bool]) -> bool:
    return one() or other()


def indexes(at: Node, case: ImageCase) -> bool:
    """Whether a layer of the image is on its way, or here already."""
    return any(case.reference in image["names"] for image in at.status()["images"])


def leases(at: Node) -> list[str]:
    return at.containerd.ctr("leases", "ls", "-q").split()


def test_a_daemon_ends_the_leases_that_it_left_when_it_was_killed_and_no_other_s(at: Node) -> None:
    ours = (at.ember.root / "name").read_text().strip()
    at.ember.kill()
    for lease, owner in (("left-by-us", ours), ("of-another", "f" * 32)):
        at.containerd.ctr("leases", "create", "--id", lease, f"ember/pull-of={owner}")
    at.containerd.ctr("leases", "create", "--id", "of-nobody")
    at.start_again()
    assert at.until(lambda: sorted(leases(at)) == ["of-another", "of-nobody"], 10)
    at.containerd.ctr("leases", "rm", "of-another", "of-nobody")


def test_keeper_and_daemon_die_in_turn_under_readers_and_nobody_sees_it(
    at: Node, lazily: Lazily
) -> None:
    case = lazily("turns")
    with container(at, case.reference) as runs:
        reading = [runs.begin(f"/f{n}") for n in range(3)]
        for _ in range(2):
            (holder,) = keepers(at)
            os.kill(holder, signal.SIGKILL)
            # The answer of before may still come: a process takes its time to die.
            assert at.until(partial(has_another_keeper, at, holder))
            at.ember.kill()
            at.start_again()
        assert [told(each) for each in reading] == [crc_of("turns", n) for n in range(3)]
        assert at.image(case.reference)["suspect"] == ""


def test_what_ran_without_a_guard_is_named_until_it_is_gone_and_what_comes_next_is_not(
    at: Node, lazily: Lazily
) -> None:
    case = lazily("unguarded")
    with ExitStack() as first:
        old = first.enter_context(container(at, case.reference))
        at.ember.kill()
        for holder in keepers(at):
            os.kill(holder, signal.SIGKILL)
        assert at.until(lambda: not keepers(at))
        at.start_again()
        named = f"{at.namespace}/{old.name}"
        assert f"restart those that run on it: {named}" in at.ember.log()
        with container(at, case.reference) as new:
            assert new.read("/f0") == crc_of("unguarded", 0)
            assert at.image(case.reference)["suspect_containers"] == [named]
            at.ember.kill()
            at.start_again()
            assert at.image(case.reference)["suspect_containers"] == [named]
            first.close()
            assert at.image(case.reference)["suspect"] == ""
            assert new.read("/f1") == crc_of("unguarded", 1)
            at.ember.kill()
            at.start_again()
            assert len(layer_mounts(at)) == 2
