"""The whole daemon under the faults of a node: crashes, a lost guard, a reboot, a full disk.

Readers are processes of their own that check every byte. What must hold is the same each time:
right bytes, or waiting, or an error that says why; never zeros, never a mount or process left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.bed.bed import drop_page_cache
from bench.bed.link import Shape
from ioengine.mounts import unmount
from tests.containers import as_after_a_power_loss, has_another_keeper, keepers, layer_mounts
from tests.node import Node, node
from tests.patience import until, waits_for_bytes
from tests.readers import ended_well, lazily, noisy, reader, sha256_of, told_of_waiting

pytestmark = [pytest.mark.root, pytest.mark.containerd]


SLOW = Shape(40)


def ended(process: subprocess.Popen[str]) -> bool:
    return process.poll() is not None


def waits(process: subprocess.Popen[str]) -> bool:
    """Whether it stands still in a read that only a guard can end."""
    return waits_for_bytes(process.pid)


def fetched_for(at: Node, readers: list[subprocess.Popen[str]], count: int) -> bool:
    """Whether so many reads were fetched for in this daemon's time, or all readers have ended."""
    return all(map(ended, readers)) or int(at.status()["misses"]["asked"]) >= count


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    # Its tests take longer than completion's delay: a hole must be one until its reader comes.
    with node(tmp_path_factory.mktemp("cache"), shape=SLOW, completion=False) as made:
        yield made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def test_a_daemon_killed_in_mid_read_costs_its_readers_time_and_no_error(slow: Node) -> None:
    case = noisy("midread")
    lazily(slow, case)
    with slow.mounted(case.chain_id) as root:
        readers = [
            reader(root / name, sha256_of(case, name), seed)
            for seed, name in enumerate(sorted(case.rows) * 2)
        ]
        assert slow.until(lambda: slow.status()["misses"]["asked"] > 5)
        slow.ember.kill()
        assert until(lambda: all(ended(process) or waits(process) for process in readers))
        assert any(waits(process) for process in readers)
        slow.start_again()
        assert [ended_well(process) for process in readers] == [""] * 4
        assert slow.status()["misses"]["failed"] == 0


def test_readers_see_right_bytes_through_one_kill_after_the_other(slow: Node) -> None:
    case = noisy("kills", count=4)
    lazily(slow, case)
    chance = random.Random(5)
    with slow.mounted(case.chain_id) as root:
        readers = [
            reader(root / name, sha256_of(case, name), seed)
            for seed, name in enumerate(sorted(case.rows) * 2)
        ]
        for _ in range(6):
            assert until(partial(fetched_for, slow, readers, chance.randint(1, 8)))
            slow.ember.kill()
            slow.start_again()
        assert [ended_well(process) for process in readers] == [""] * 8


def test_with_the_registry_down_waiting_orphans_hold_up_no_read_of_what_is_here(
    fresh: Node,
) -> None:
    here, gone = noisy("presenthere", count=4), noisy("presentgone")
    lazily(fresh, here)
    lazily(fresh, gone)
    name, missing = min(here.rows), min(gone.rows)
    with fresh.mounted(here.chain_id) as shown, fresh.mounted(gone.chain_id) as hollow:
        assert ended_well(reader(shown / name, sha256_of(here, name))) == ""
        fresh.bed.registry.stop()
        waiting = reader(hollow / missing, sha256_of(gone, missing))
        assert fresh.until(lambda: fresh.status()["guard"]["outstanding"] > 0)
        fresh.ember.kill()
        fresh.start_again()
        drop_page_cache()  # the next read raises events, as that of another container would
        assert ended_well(reader(shown / name, sha256_of(here, name)), 20) == ""
        guard = fresh.status()["guard"]
        assert guard["orphans"] > 0
        assert guard["allowed"] > 0
        assert waiting.poll() is None
        assert fresh.until(lambda: "registry" in told_of_waiting(fresh)), told_of_waiting(fresh)
        fresh.bed.registry.start()
        assert ended_well(waiting) == ""
        assert fresh.until(lambda: fresh.status()["guard"]["orphans"] == 0)


def test_a_clean_stop_leaves_mounts_and_containers_and_a_start_takes_them_up(slow: Node) -> None:
    case = noisy("stopped")
    lazily(slow, case)
    name = min(case.rows)
    with slow.mounted(case.chain_id) as root:
        before = layer_mounts(slow)
        slow.ember.stop()
        assert layer_mounts(slow) == before
        waiting = reader(root / name, sha256_of(case, name))
        assert until(lambda: waits(waiting))
        slow.start_again()
        assert ended_well(waiting) == ""
        assert layer_mounts(slow) == before


def test_a_keeper_that_is_killed_is_replaced_and_holds_again_what_must_be_held(
    fresh: Node,
) -> None:
    case = noisy("keeper")
    lazily(fresh, case)
    name = min(case.rows)
    with fresh.mounted(case.chain_id) as root:
        (first,) = keepers(fresh)
        os.kill(first, signal.SIGKILL)
        assert fresh.until(lambda: fresh.status()["daemon"]["keeper_losses"] == 1)
        assert fresh.until(lambda: has_another_keeper(fresh, first))
        assert keepers(fresh) != [first]
        assert "the keeper died" in fresh.ember.log()
        fresh.ember.kill()
        waiting = reader(root / name, sha256_of(case, name))
        fresh.start_again()
        assert ended_well(waiting) == ""
        assert fresh.image(case.reference)["suspect"] == ""


def test_losing_keeper_and_daemon_is_named_and_the_next_mount_is_right(fresh: Node) -> None:
    case = noisy("lost")
    lazily(fresh, case)
    with fresh.mounted(case.chain_id):
        fresh.ember.kill()
        for pid in keepers(fresh):
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: not keepers(fresh))
        fresh.start_again()
        assert "no guard was there" in fresh.ember.log()
        assert "restart its containers" in fresh.image(case.reference)["suspect"]
        with fresh.mounted(case.chain_id) as root:
            for name in case.rows:
                assert ended_well(reader(root / name, sha256_of(case, name))) == ""


def test_a_daemon_killed_while_it_indexes_begins_again_and_the_container_starts(
    slow: Node,
) -> None:
    case = noisy("halfindexed", size=4_000_000)
    case.push(slow.bed.registry)
    assert slow.pull(case.reference).lazy_layers == 2
    assert slow.until(lambda: bool(slow.status()["indexing"]))
    slow.ember.kill()
    slow.start_again()
    with slow.mounted(case.chain_id) as root:
        for name in case.rows:
            assert ended_well(reader(root / name, sha256_of(case, name))) == ""


def test_a_pull_that_is_cut_short_is_simply_done_again(slow: Node) -> None:
    case = noisy("cutshort", size=2_000_000)
    case.push(slow.bed.registry)
    request = [sys.executable, "-B", "-m", "snapshotter.cli.main", "pull", case.reference]
    words = ["--config", str(slow.ember.configuration), "--namespace", slow.namespace]
    process = subprocess.Popen([*request, *words], stderr=subprocess.DEVNULL)
    assert slow.until(lambda: bool(slow.status()["indexing"]))
    process.kill()
    process.wait()
    assert slow.pull(case.reference).layers == 2
    with slow.mounted(case.chain_id) as root:
        name = min(case.rows)
        assert ended_well(reader(root / name, sha256_of(case, name))) == ""


def test_after_a_reboot_with_the_registry_down_everything_that_was_here_is_here(
    fresh: Node,
) -> None:
    case = noisy("reboot")
    lazily(fresh, case)
    with fresh.mounted(case.chain_id):
        fresh.ember.complete()
    fresh.ember.kill()
    for pid in keepers(fresh):
        os.kill(pid, signal.SIGKILL)
    for target in [*layer_mounts(fresh), fresh.ember.state / "guarded"]:
        unmount(target, detach=True)
    for leftover in sorted(fresh.ember.state.rglob("*"), reverse=True):
        leftover.rmdir() if leftover.is_dir() else leftover.unlink()
    as_after_a_power_loss(fresh.ember.root)
    fresh.bed.registry.stop()
    fresh.start_again()
    with fresh.mounted(case.chain_id) as root:
        for name in case.rows:
            assert ended_well(reader(root / name, sha256_of(case, name))) == ""
    assert fresh.status()["tiers"].get("registry", 0) == 0


def test_what_was_drained_needs_no_registry_and_no_daemon(fresh: Node) -> None:
    case = noisy("drained")
    lazily(fresh, case)
    with fresh.mounted(case.chain_id) as root:
        fresh.ember.complete()
        fresh.bed.registry.stop()
        fresh.ember.kill()
        for name in case.rows:
            assert ended_well(reader(root / name, sha256_of(case, name)), 20) == ""
        fresh.start_again()


def test_data_that_a_container_stands_on_is_kept_and_said_so(fresh: Node) -> None:
    case = noisy("inuse")
    lazily(fresh, case)
    name = min(case.rows)
    with fresh.mounted(case.chain_id, writable=True) as root:
        before = layer_mounts(fresh)
        reply = fresh.drop(case.reference)
        assert any("in use by a running container" in line for line in reply.kept)
        assert layer_mounts(fresh) == before
        assert ended_well(reader(root / name, sha256_of(case, name))) == ""
        fresh.ember.complete()
        shown = fresh.image(case.reference)
        assert shown["here_bytes"] == shown["plain_bytes"]
    assert not fresh.drop(case.reference).kept


def test_data_under_an_overlay_that_tells_nothing_is_kept_by_the_kernels_word(fresh: Node) -> None:
    """A read-only overlay may name its layers in a way that any other snapshotter's would too."""
    case = noisy("readonly")
    lazily(fresh, case)
    with fresh.mounted(case.chain_id) as root:
        reply = fresh.drop(case.reference)
        assert any("in use by a running container" in line for line in reply.kept)
        for name in case.rows:
            assert ended_well(reader(root / name, sha256_of(case, name))) == ""
    assert not fresh.drop(case.reference).kept


def test_a_mount_that_goes_while_a_read_waits_leaves_nothing_behind(slow: Node) -> None:
    case = noisy("unmounted")
    lazily(slow, case)
    name = min(case.rows)
    with slow.mounted(case.chain_id) as root:
        slow.ember.kill()
        waiting = reader(root / name, sha256_of(case, name))
        assert until(lambda: waits(waiting))
        waiting.kill()
        waiting.wait(10)
    slow.start_again()
    with slow.mounted(case.chain_id) as root:
        assert ended_well(reader(root / name, sha256_of(case, name))) == ""


def test_containerd_may_be_killed_and_restarted_under_lazy_layers(fresh: Node) -> None:
    case = noisy("containerd")
    lazily(fresh, case)
    names = sorted(case.rows)
    with fresh.mounted(case.chain_id) as root:
        fresh.containerd.kill()
        assert ended_well(reader(root / names[0], sha256_of(case, names[0]))) == ""
        fresh.containerd.start()
        fresh.connect()
        assert ended_well(reader(root / names[1], sha256_of(case, names[1]))) == ""
    assert fresh.shown(case.chain_id)


def test_garbage_collection_while_chunks_arrive_takes_only_garbage(slow: Node) -> None:
    kept, gone = noisy("gckept"), noisy("gcgone", size=100_000)
    lazily(slow, kept)
    gone.push(slow.bed.registry)
    slow.pull(gone.reference)
    with slow.mounted(gone.chain_id):
        pass
    name = min(kept.rows)
    with slow.mounted(kept.chain_id) as root:
        reading = reader(root / name, sha256_of(kept, name))
        slow.containerd.remove_image(gone.reference)
        assert ended_well(reading) == ""
    listed = slow.containerd.ctr("snapshots", "--snapshotter", "ember", "ls")
    assert gone.chain_id not in listed
    assert kept.chain_id in listed


@pytest.mark.parametrize("what", ["index", "windows", "metadata", "presence", "view"])
def test_a_file_that_was_cut_while_nobody_looked_costs_time_and_never_bytes(
    fresh: Node, what: str
) -> None:
    case = noisy(f"cut{what}", size=400_000)
    lazily(fresh, case)
    with fresh.mounted(case.chain_id):
        fresh.ember.complete()
    fresh.ember.stop()
    for target in layer_mounts(fresh):
        unmount(target, detach=True)
    folder, pattern = {
        "index": ("index", "*.idx"),
        "windows": ("index", "*.win"),
        "metadata": ("metadata", "*.erofs"),
        "presence": ("presence", "*"),
        "view": ("views", "*"),
    }[what]
    for path in (fresh.ember.root / folder).glob(pattern):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
    fresh.start_again()
    with fresh.mounted(case.chain_id) as root:
        for name in case.rows:
            assert ended_well(reader(root / name, sha256_of(case, name))) == ""


def test_a_daemon_that_stands_still_holds_up_its_readers_and_nothing_else(fresh: Node) -> None:
    case = noisy("still")
    lazily(fresh, case)
    name = min(case.rows)
    with fresh.mounted(case.chain_id) as root:
        os.kill(fresh.ember.pid, signal.SIGSTOP)
        waiting = reader(root / name, sha256_of(case, name))
        assert until(lambda: waits(waiting))
        os.kill(fresh.ember.pid, signal.SIGCONT)
        assert ended_well(waiting) == ""


def test_asking_for_status_is_quick_and_never_taken_for_the_keepers_death(fresh: Node) -> None:
    (keeper,) = keepers(fresh)
    began_s = time.monotonic()
    for _ in range(200):
        assert fresh.status()["daemon"]["keeper"] == f"pid {keeper}"
    assert time.monotonic() - began_s < 8  # one misunderstanding costs ten seconds
    assert fresh.status()["daemon"]["keeper_losses"] == 0


def test_with_few_descriptors_fewer_reads_are_taken_up_at_once_and_all_are_answered(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = noisy("few")
    lazily(fresh, case)
    fresh.ember.stop()
    enter = list(fresh.ember.link.enter())
    limited = [*enter, "prlimit", "--nofile=256:256"]
    monkeypatch.setattr(type(fresh.ember.link), "enter", lambda _: limited)
    fresh.start_again()
    with fresh.mounted(case.chain_id) as root:
        for name in case.rows:
            assert ended_well(reader(root / name, sha256_of(case, name))) == ""
