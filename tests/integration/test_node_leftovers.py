"""What a daemon that died left half done, and what nobody but root may reach."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import grpc
import pytest

from bench.bed.bed import Bed
from bench.bed.link import Shape
from bench.bed.process import BedError
from ioengine.keeper import Keeper, KeeperError
from ioengine.mounts import mountinfo, unmount
from tests.cases.images import ImageCase
from tests.containers import as_after_a_power_loss, layer_mounts, reading_image
from tests.node import Node, mount, node
from tests.readers import ended_well, lazily, noisy, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

NOBODY = 65534


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def pulled(at: Node, name: str) -> ImageCase:
    case = reading_image(b"\x7fELF", name)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    return case


def test_a_layer_whose_removal_a_crash_cut_short_is_unmounted_by_the_next_daemon(
    at: Node,
) -> None:
    pulled(at, "cutshort")
    left = layer_mounts(at)
    assert left
    at.ember.kill()
    with closing(sqlite3.connect(at.ember.root / "ember.db")) as database:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("DELETE FROM snapshots")
        database.commit()
    at.start_again()
    assert layer_mounts(at) == []
    assert not list((at.ember.state / "layers").iterdir())


def test_no_local_user_reaches_the_files_of_an_image(at: Node) -> None:
    pulled(at, "private")
    targets = [*layer_mounts(at), at.ember.state / "guarded", *at.ember.root.iterdir()]
    assert len(targets) > 5
    for parent in {*at.ember.root.parents, *at.ember.state.parents} - {Path("/")}:
        parent.chmod(parent.stat().st_mode | 0o111)
    for target in targets:
        if target.is_dir():
            found = subprocess.run(["ls", target], user=NOBODY, capture_output=True, check=False)
            assert found.returncode != 0, target
    assert os.access(targets[0], os.R_OK)


def test_a_mount_that_comes_too_late_fails_and_never_shows_an_empty_layer(at: Node) -> None:
    """Between Mounts and mount(2) of a container's start the data of its image is removed."""
    case = pulled(at, "late")
    everything = {*case.rows, "name", "program"}
    target = at.bed.directory / "late"
    target.mkdir()
    over, seen = threading.Event(), Counter[str]()
    with at.snapshot(case.chain_id) as ask:
        handed_out = ask()

        def start_late() -> None:
            while not over.is_set():
                try:
                    mount(handed_out, target)
                except OSError as error:  # EINVAL: unmounted while overlayfs looked at it
                    assert error.errno in (errno.ENOENT, errno.EINVAL)
                    seen["too late"] += 1
                    continue
                seen[
                    "whole" if {each.name for each in target.iterdir()} == everything else "EMPTY"
                ] += 1
                unmount(target, detach=False)

        late = threading.Thread(target=start_late)
        late.start()
        try:
            for _ in range(15):
                with contextlib.suppress(grpc.RpcError):  # in use just then
                    at.drop(case.reference)
                ask()
        finally:
            over.set()
            late.join()
    assert seen["EMPTY"] == 0, seen
    assert seen["whole"] > 0, seen
    assert seen["too late"] > 0, seen


def test_what_is_lazy_already_is_served_with_the_lazy_mode_off(at: Node) -> None:
    case = pulled(at, "off")
    assert not at.drop(case.reference).kept
    with at.mounted(case.chain_id, writable=True) as root:
        first, *others = sorted(case.rows)
        at.ember.stop()
        at.ember.configure(sections={"lazy": {"mode": "off"}})
        waiting = subprocess.Popen(["cat", root / first], stdout=subprocess.PIPE)
        at.start_again()
        assert waiting.communicate(timeout=30)[0] == (root / first).read_bytes()
        assert all((root / name).read_bytes() for name in others)
        assert at.image(case.reference)["suspect"] == ""
    with at.mounted(case.chain_id) as root:
        assert (root / first).stat().st_size
    assert "off" in str(at.status()["daemon"]["data_path"])
    plain = reading_image(b"\x7fELF", "plain")
    plain.push(at.bed.registry)
    assert at.pull(plain.reference).lazy_layers == 0


def test_what_a_power_loss_left_in_doubt_is_proved_while_the_daemon_answers(at: Node) -> None:
    """With completion on, as it is for users: a view that lacks only proof is no busy work."""
    case = reading_image(b"\x7fELF", "doubted", count=12, size=3_000_000)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    assert not at.drop(case.reference).kept
    with at.mounted(case.chain_id):
        at.ember.complete()
    at.ember.stop()
    as_after_a_power_loss(at.ember.root)
    at.ember.configure(completion=True, sections={"completion": {"delay": 0}})
    at.start_again()
    asked = at.status()["tiers"].get("registry", 0)
    with at.mounted(case.chain_id, writable=True) as root:
        over = "complete; reads of it cost no events"
        assert at.until(lambda: at.ember.log().count(over) == 4, 30), at.ember.log()
        assert all((root / name).read_bytes() for name in case.rows)
    assert at.status()["tiers"].get("registry", 0) == asked


def fetched(at: Node, case: ImageCase) -> tuple[int, bool]:
    """How many bytes are here, and whether those are all."""
    shown = at.image(case.reference)
    return shown["here_bytes"], shown["here_bytes"] == shown["plain_bytes"]


def more_than(at: Node, case: ImageCase, before: int) -> bool:
    here, whole = fetched(at, case)
    return whole or here > before


def test_the_rest_is_fetched_beside_a_reader_through_one_kill_after_the_other(at: Node) -> None:
    at.ember.configure(completion=True, sections={"completion": {"delay": 0, "rate": 1_000_000}})
    at.ember.stop()
    at.start_again()
    case = noisy("therest", size=2_500_000)
    lazily(at, case)
    name = min(case.rows)
    with at.mounted(case.chain_id) as root:
        reading = reader(root / name, sha256_of(case, name))
        for _ in range(3):
            assert at.until(partial(more_than, at, case, fetched(at, case)[0]))
            at.ember.kill()
            at.start_again()
        assert ended_well(reading) == ""
        assert at.until(lambda: fetched(at, case)[1])
        assert at.status()["misses"]["failed"] == 0


def removed_in_the_middle(at: Node, name: str) -> None:
    case = reading_image(b"\x7fELF", name, count=4, size=2_000_000)
    case.push(at.bed.registry)
    assert at.pull(case.reference).lazy_layers == 2
    with at.mounted(case.chain_id):
        pass
    assert not at.drop(case.reference).kept
    with at.mounted(case.chain_id):
        assert at.until(lambda: at.image(case.reference)["here_bytes"] > 0, 20)
    at.remove(case.reference)


def test_an_image_may_be_removed_while_the_rest_of_it_is_being_fetched(at: Node) -> None:
    at.ember.configure(completion=True, sections={"completion": {"delay": 0, "rate": 2_000_000}})
    at.ember.stop()
    at.start_again()
    pid = at.ember.pid
    for number in range(3):
        removed_in_the_middle(at, f"fetching{number}")
        assert at.status()["daemon"]["pid"] == pid
    assert "Traceback" not in at.ember.log()


def test_a_namespace_that_containerd_has_no_words_for_is_refused_at_once(at: Node) -> None:
    for namespace in ("ü", "a\0b", "a b"):
        with pytest.raises(grpc.RpcError) as caught:
            at.pull("localhost:5000/none:1", namespace)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in at.ember.log()


def test_the_way_out_of_a_lost_database_works_and_is_told(at: Node) -> None:
    case = pulled(at, "lost")
    at.ember.stop()
    away = at.ember.root / "away"
    away.mkdir()
    for path in [*at.ember.root.glob("ember.db*"), at.ember.root / "snapshots"]:
        path.rename(away / path.name)
    at.start_again()
    assert at.until(lambda: any("pulling them again changes nothing" in n for n in notes(at)))
    assert at.ember.log().count("pulling them again changes nothing") == 1
    at.pull(case.reference)
    with pytest.raises(grpc.RpcError, match="does not exist"), at.snapshot(case.chain_id):
        raise AssertionError("if containerd asks Ember again, there is no need for words")
    at.containerd.ctr("images", "rm", "--sync", case.reference)
    assert at.until(lambda: not at.blobs())
    assert at.pull(case.reference).lazy_layers == 2
    assert at.shown(case.chain_id)


def notes(at: Node) -> list[str]:
    return list(at.status()["notes"])


def test_a_daemon_whose_last_step_fails_leaves_no_keeper_behind(tmp_path: Path) -> None:
    with Bed(Shape(0), cache=tmp_path) as bed:
        ember = bed.ember(1)
        ember.socket.mkdir(parents=True)
        (ember.socket / "in the way").touch()
        with pytest.raises(BedError):
            ember.start()
        assert str(ember.socket) in ember.log()
        assert [m.target for m in mountinfo() if ember.state in m.target.parents] == []
        with pytest.raises(KeeperError):
            Keeper.connect(ember.state / "keeper.sock")


def test_a_pull_that_dies_in_the_middle_leaves_no_word_of_images_that_are_lost(
    tmp_path: Path,
) -> None:
    case = reading_image(b"\x7fELF", "halfway", count=2, size=3_000_000)
    with node(tmp_path, shape=Shape(30), first_pull="overlay") as at:
        case.push(at.bed.registry)

        def pull() -> None:
            with contextlib.suppress(grpc.RpcError):
                at.pull(case.reference)

        pulling = threading.Thread(target=pull)
        pulling.start()
        assert at.until(lambda: len(at.blobs()) >= 2)
        at.ember.kill()
        pulling.join(30)
        at.start_again()
        assert at.pull(case.reference).layers == 2
        assert set(at.shown(case.chain_id)) >= set(case.rows)
        assert not any("believes" in note for note in notes(at))
        assert "CRITICAL" not in at.ember.log()
