"""A daemon comes back to readers that wait for it, whatever its own probe could not do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ioengine import mounts
from ioengine.guard import GROUP_NAME, JOURNAL_NAME
from ioengine.keeper import Keeper
from ioengine.kept_memory import KeptMemory
from ioengine.probe import SCRATCH_PREFIX
from ioengine.probe_lazy import FANOTIFY
from snapshotter.chunks.space import BALLAST
from snapshotter.daemon.room import NAME, ROOM_BYTES, room_to_try
from snapshotter.errors import UnavailableError
from snapshotter.imagefs.datapath import DataPath
from tests.conformance.snapshots.whole import end_keeper
from tests.integration.guard_bed import until
from tests.integration.test_daemon_manners import small_ext4

pytestmark = pytest.mark.root

DEAD = "DEAD, being replaced: a crash of the daemon now would make reads unsafe"


def open_path(root: Path, state: Path, stored: Mapping[str, int] | None = None) -> DataPath:
    path = DataPath.open(root, state, wanted=True, stored=stored or {})
    path.settle()
    return path


@contextlib.contextmanager
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Root on a file system of its own, and state; keeper and mounts go at the end."""
    state = tmp_path / "state"
    state.mkdir()
    with small_ext4(tmp_path, 16 * 2**20) as root:
        try:
            yield root, state
        finally:
            end_keeper(state / "keeper.sock")
            mounts.unmount(state / "guarded", detach=True)


def fill(root: Path) -> Path:
    """Take the last block and the last inode."""
    filler = root / "filler"
    filler.mkdir()
    with contextlib.suppress(OSError), (filler / "blocks").open("wb", buffering=0) as file:
        for length in (2**16, 512):
            with contextlib.suppress(OSError):
                while file.write(bytes(length)) == length:
                    pass
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (filler / f"{number}").touch()
    return filler


@pytest.mark.parametrize("holder", ["keeper", "service manager"])
def test_a_guard_that_outlived_its_daemon_is_taken_up_on_a_full_disk(
    tmp_path: Path, holder: str
) -> None:
    with small_disk(tmp_path) as (root, state):
        first = open_path(root, state)
        stored = {name: os.dup(fd) for name, fd in first.descriptors().items()}
        first.close()
        if holder == "keeper":
            for descriptor in stored.values():
                os.close(descriptor)
            stored = {}
        else:
            end_keeper(state / "keeper.sock")
        fill(root)
        again = open_path(root, state, stored)
        try:
            assert again.name == FANOTIFY
            assert again.guard is not None and again.guard.adopted
            assert again.reasons == ()
        finally:
            again.close()


@pytest.mark.parametrize("holder", ["keeper", "service manager"])
def test_memory_is_handed_from_daemon_to_daemon(tmp_path: Path, holder: str) -> None:
    with small_disk(tmp_path) as (root, state):
        first = open_path(root, state)
        assert first.memory("secrets", 1000, make=False) is None
        memory = first.memory("secrets", 1000, make=True)
        assert memory is not None
        memory.save(b"of the first")
        stored = {name: os.dup(fd) for name, fd in first.descriptors().items()}
        assert sorted(stored) == [GROUP_NAME, JOURNAL_NAME, "secrets"]
        first.close()
        if holder == "service manager":
            end_keeper(state / "keeper.sock")
        again = open_path(root, state, stored)
        found = again.memory("secrets", 1000, make=False)
        assert found is not None and found.load() == b"of the first"
        again.close()
        with pytest.raises(OSError):
            os.fstat(stored["secrets"])


async def test_a_new_keeper_is_given_all_that_the_dead_one_held(tmp_path: Path) -> None:
    with small_disk(tmp_path) as (root, state):
        path = open_path(root, state)
        memory = path.memory("secrets", 1000, make=True)
        assert memory is not None
        path.watch_keeper()
        memory.save(b"kept")
        pid = int(path.keeper_text().removeprefix("pid "))
        os.kill(pid, signal.SIGKILL)
        old = (f"pid {pid}", DEAD)
        await asyncio.to_thread(until, lambda: path.keeper_text() not in old, "a new keeper")
        with Keeper.connect(state / "keeper.sock") as keeper:
            assert sorted(keeper.names()) == [GROUP_NAME, JOURNAL_NAME, "secrets"]
            held = keeper.get("secrets")
        assert held is not None
        found = KeptMemory(held[0])
        assert found.load() == b"kept"
        found.close()
        path.close()


def test_a_full_disk_without_a_guard_is_one_error_in_words(tmp_path: Path) -> None:
    with small_disk(tmp_path) as (root, state):
        fill(root)
        with pytest.raises(UnavailableError, match="No space left"):
            open_path(root, state)
        assert not list(root.glob(SCRATCH_PREFIX + "*"))
        assert not [m for m in mounts.mountinfo() if state in m.target.parents]


@pytest.mark.parametrize("spare", [NAME, BALLAST])
def test_a_full_disk_has_room_for_a_start_as_long_as_any_is_set_aside(
    tmp_path: Path, spare: str
) -> None:
    with small_disk(tmp_path) as (root, state):
        with (root / spare).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * ROOM_BYTES)
        fill(root)
        with room_to_try(root):
            path = open_path(root, state)
        assert path.name == FANOTIFY
        path.close()
        end_keeper(state / "keeper.sock")
        assert (root / NAME).stat().st_size == ROOM_BYTES


def test_the_files_of_a_killed_probe_keep_no_daemon_from_starting(tmp_path: Path) -> None:
    with small_disk(tmp_path) as (root, state):
        (root / f"{SCRATCH_PREFIX}x").touch()
        path = open_path(root, state)
        assert path.name == FANOTIFY
        path.close()


def test_a_keeper_that_stands_still_is_to_go_on_and_nothing_is_done_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ioengine.keeper.TIMEOUT_S", 0.3)
    with small_disk(tmp_path) as (root, state):
        first = open_path(root, state)
        pid = int(first.keeper_text().removeprefix("pid "))
        first.close()
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(UnavailableError, match=rf"process {pid}\).*kill -CONT"):
                open_path(root, state)
        finally:
            os.kill(pid, signal.SIGCONT)
        again = open_path(root, state)
        assert again.guard is not None and again.guard.adopted
        again.close()


def test_a_start_that_fails_leaves_no_keeper_and_no_mount_of_its_own(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    for directory in (root, state):
        directory.mkdir()
    socket, guarded = state / "keeper.sock", state / "guarded"
    DataPath.open(root, state, wanted=True, stored={}).close()
    assert not mounts.is_mounted(guarded)
    until(lambda: not keeper_answers(socket), "the keeper ends")
    serving = open_path(root, state)
    serving.close()
    DataPath.open(root, state, wanted=True, stored={}).close()  # nor takes another's away
    assert mounts.is_mounted(guarded) and keeper_answers(socket)
    end_keeper(socket)
    mounts.unmount(guarded, detach=True)


def keeper_answers(socket: Path) -> bool:
    with contextlib.suppress(OSError), Keeper.connect(socket):
        return True
    return False


def test_a_journal_that_is_none_is_named_with_a_way_out_that_works(tmp_path: Path) -> None:
    with small_disk(tmp_path) as (root, state):
        first = open_path(root, state)
        descriptors = first.descriptors()
        (journal,) = [fd for name, fd in descriptors.items() if "journal" in name]
        os.pwrite(journal, bytes(64), 0)
        first.close()
        with pytest.raises(UnavailableError, match=r"not a journal.*kill the keeper"):
            open_path(root, state)
        end_keeper(state / "keeper.sock")
        open_path(root, state).close()
