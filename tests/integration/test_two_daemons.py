"""Daemons that are started at the same instant on one place: one serves, the others say why not.

Each round begins as another ended: with a keeper or without, after a stop or a crash.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ioengine.mounts import unmount
from snapshotter.rpc.pb.ember.control.v1 import control_pb2, control_pb2_grpc
from tests.conformance.snapshots.whole import end_keeper
from tests.integration.test_daemon_manners import serve
from tests.patience import until

pytestmark = pytest.mark.root

ENDS = (signal.SIGKILL, signal.SIGTERM)
START_S = 20.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a real disk; in the end nothing of its daemons is left."""
    directory = Path(subprocess.check_output(["mktemp", "-d", "-p", "/var/tmp"], text=True).strip())
    yield directory
    end_keeper(directory / "s" / "keeper.sock")
    for state in directory.glob("s*"):
        with contextlib.suppress(OSError):
            unmount(state / "guarded", detach=True)
    subprocess.run(["rm", "-rf", "--one-file-system", str(directory)], check=True)


def configure(place: Path, root: str = "root", state: str = "s") -> None:
    text = f'root = "{place}/{root}"\nstate = "{place}/{state}"\n'
    (place / "config.toml").write_text(text)


def pid_of_server(place: Path) -> int:
    """Who answers on the socket."""
    with grpc.insecure_channel(f"unix:{place}/s/ember.sock") as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        answer = stub.Status(control_pb2.StatusRequest(), timeout=START_S, wait_for_ready=True)
    return int(json.loads(answer.json)["daemon"]["pid"])


def losers(daemons: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Those that have ended, as soon as only one is left."""
    assert until(lambda: len(ended(daemons)) >= len(daemons) - 1, START_S)
    return ended(daemons)


def ended(daemons: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    return [each for each in daemons if each.poll() is not None]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.name)
def test_of_daemons_started_at_the_same_instant_one_serves(
    place: Path, end: signal.Signals
) -> None:
    configure(place)
    for _ in range(2):
        daemons = [serve(place) for _ in range(3)]
        try:
            ended = losers(daemons)
            said = [each.communicate(timeout=5)[1] for each in ended]
            assert all(each.returncode == 1 for each in ended), said
            assert all("another daemon works on" in each for each in said)
            assert not any("Traceback" in each for each in said)
            (served,) = [each for each in daemons if each not in ended]
            assert pid_of_server(place) == served.pid
            served.send_signal(end)
            _, log = served.communicate(timeout=START_S)
            assert served.returncode == (0 if end == signal.SIGTERM else -end)
            assert "Traceback" not in log
        finally:
            for each in daemons:
                each.kill()
                each.communicate()


def test_a_daemon_with_a_cache_of_its_own_leaves_the_guard_of_another_alone(place: Path) -> None:
    configure(place)
    first = serve(place)
    try:
        assert pid_of_server(place) == first.pid
        configure(place, root="another")
        second = serve(place)
        _, said = second.communicate(timeout=START_S)
        assert second.returncode == 1
        assert f"another daemon works on {place}/s; stop it, or set another state" in said
        assert pid_of_server(place) == first.pid
    finally:
        first.kill()
        first.communicate()
