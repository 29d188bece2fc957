"""Other snapshotters: what they need is named, what they are told can be read, figures compare."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.cases.peers import PEERS, Cost, figures
from bench.peers.peer import Peer

SCRIPT = "#!/bin/sh\nset -e\n"


@pytest.fixture(params=PEERS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> type[Peer]:
    found: type[Peer] = request.param
    return found


def test_what_is_not_on_the_path_is_named(
    kind: type[Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kind.missing() == list(kind.programs)
    for program in kind.programs[1:]:
        (tmp_path / program).write_text(SCRIPT)
        (tmp_path / program).chmod(0o755)
    assert kind.missing() == [kind.programs[0]]


def test_the_daemon_is_told_of_this_bed_alone(
    kind: type[Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in kind.programs:
        (tmp_path / program).write_text(SCRIPT)
        (tmp_path / program).chmod(0o755)
    bed = Bed(base=tmp_path, cache=tmp_path)
    peer = kind(bed)
    peer.directory.mkdir(parents=True)
    text = peer.configuration(Containerd(bed.directory, bed.link))
    command = " ".join(peer.command(tmp_path / "config"))
    assert isinstance(tomllib.loads(text), dict)
    for place in (peer.root, peer.socket):
        assert str(place) in text + command
    assert "/var/lib" not in text + command and '= "/run/' not in text


def test_a_peer_that_never_ran_can_be_stopped(kind: type[Peer], tmp_path: Path) -> None:
    peer = kind(Bed(base=tmp_path, cache=tmp_path))
    peer.stop()
    assert not peer.directory.exists()


def test_every_column_is_set_beside_each_of_the_others() -> None:
    ours = [Cost(1.0, 3.0, 30_000_000, 1.0, 100_000_000)]
    others = {"overlayfs": [Cost(9.0, 10.0, 200_000_000, 6.0, 50_000_000)], "x": ours}
    found = figures({"ember": ours, **others})
    assert [f.name for f in found[:2]] == ["overlayfs: pull", "overlayfs: ready"]
    assert len(found) == 10
    assert {f.met for f in found[:5]} == {None}, "nobody asks to hold less than containerd alone"
    assert {f.met for f in found[5:]} == {True}
    assert (found[2].ours, found[2].theirs) == (30.0, 200.0)
