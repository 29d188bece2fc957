"""What a script relies on: exit codes, and that complaints never mix with results."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import typer

from snapshotter.cli import connection
from snapshotter.cli.connection import Daemon
from snapshotter.errors import (
    DeadlineError,
    EmberError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from snapshotter.rpc.control import DrainState, Removal
from tests.fakes.daemon import FakeOperations
from tests.unit.cli.conftest import Place

NOBODY = 65534
ASKING = [["images"], ["status"], ["pull", "app"], ["warm", "app"], ["rm", "app"], ["drain"]]
RAW = ("grpc", "StatusCode", "failed to connect", "Traceback", "UNAVAILABLE", "ipv4:", "last error")


@pytest.mark.parametrize("words", ASKING)
def test_what_could_be_done_ends_with_0_and_says_nothing_on_stderr(
    place: Place, served: FakeOperations, words: list[str]
) -> None:
    result = place.ember(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout


@pytest.mark.parametrize("words", ASKING)
@pytest.mark.parametrize(
    "fault",
    [
        NotFoundError("image app: not there"),
        UnavailableError("registry.example: out of reach"),
        DeadlineError("registry.example: too slow"),
        InvalidArgumentError("layer x: refused"),
        EmberError("it broke"),
    ],
)
def test_what_the_daemon_refuses_ends_with_1_and_its_own_words(
    place: Place, served: FakeOperations, words: list[str], fault: EmberError
) -> None:
    served.fault = fault
    for form in ([], ["--json"]):
        result = place.ember(*words, *form)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"ember: {fault}\n"


@pytest.mark.parametrize("words", ASKING)
def test_a_fault_of_the_daemons_own_is_told_from_a_daemon_that_is_gone(
    place: Place, served: FakeOperations, words: list[str]
) -> None:
    served.fault = KeyError("a detail of the inside")
    result = place.ember(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "failed inside Ember (KeyError); see its log" in result.stderr
    assert "detail" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["images", "--jsn"], "No such option: --jsn"),
        (["pull"], "Missing argument"),
        (["pull", ""], "ember: image reference is empty"),
        (["pull", "a:b:c"], "ember: image name 'a:b': bad repository"),
        (["pull", "app:bad tag"], "ember: image reference 'app:bad tag': bad tag"),
        (["pull", "app@sha256:12"], "ember: not a digest that OCI allows"),
        (["pull", "app", "--platform", "amd64"], "ember: platform 'amd64' is not of the form"),
        (["pull", "app", "-n", "a/b"], "ember: 'a/b' cannot be a containerd namespace"),
        (["pull", "app", "-n", ""], "ember: '' cannot be a containerd namespace"),
        (["rm", ""], "ember: the image has no name"),
        (["rm", "app", "-n", "a b"], "ember: 'a b' cannot be a containerd namespace"),
        (["status", " "], "ember: the image has no name"),
        (["images", "--config", "/nonexistent/c.toml"], "/nonexistent/c.toml: cannot be read"),
    ],
)
def test_wrong_usage_ends_with_2_and_asks_nobody(
    place: Place, served: FakeOperations, words: list[str], said: str
) -> None:
    result = place.ember(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert served.asked == []


def test_a_configuration_that_cannot_be_used_ends_with_2(place: Place) -> None:
    place.config.write_text("colour = 1")
    for words in (*ASKING, ["doctor"], ["serve"], ["serve", "--check"]):
        result = place.ember(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"ember: {place.config}: colour: no such key")


@pytest.mark.parametrize("words", ASKING)
def test_no_daemon_ends_with_3_and_the_way_to_start_one(place: Place, words: list[str]) -> None:
    result = place.ember(*words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"no daemon answers at {place.socket}; start it with `ember serve`" in result.stderr
    assert "EMBER_CONFIG" in result.stderr
    assert not [word for word in RAW if word in result.stderr]


@pytest.mark.parametrize("words", ASKING)
def test_a_socket_that_a_killed_daemon_left_is_told_from_none(
    place: Place, words: list[str]
) -> None:
    place.state.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place.socket))
    result = place.ember(*words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "the one that made this socket is gone" in result.stderr
    assert not [word for word in RAW if word in result.stderr]


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """As a user that may not use the socket; whoever is not root is one already."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_user_who_may_not_ask_is_told_so(place: Place, served: FakeOperations) -> None:
    place.socket.chmod(0)
    for words in ASKING:
        with as_somebody_else():
            result = place.ember(*words)
        assert (result.exit_code, result.stdout) == (3, "")
        assert f"may not use {place.socket}; run the command as root" in result.stderr


def test_a_socket_of_somebody_else_is_not_taken_for_the_daemon(place: Place) -> None:
    place.state.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place.socket))
        other.listen(8)
        with pytest.raises(typer.Exit) as ended:
            Daemon(place.socket, quick_s=0.5).status()
    assert ended.value.exit_code == 1


def test_a_daemon_that_hangs_is_not_waited_for_without_end(
    place: Place, served: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    served.hangs = True
    with pytest.raises(typer.Exit) as ended:
        Daemon(place.socket, quick_s=0.2).status()
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == (
        f"ember: the daemon at {place.socket} (process {os.getpid()}) is there but does not answer;"
        f" see its log, and if it stays so `kill -9 {os.getpid()}` and start it again: readers wait"
        " meanwhile\n"
    )


def test_a_daemon_that_stands_still_is_told_from_none(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_S", 0.2)
    options = (*connection._OPTIONS, ("grpc.min_reconnect_backoff_ms", 300))
    monkeypatch.setattr(connection, "_OPTIONS", options)
    place.state.mkdir()
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(place.socket))
        stopped.listen(8)
        with pytest.raises(typer.Exit) as ended:
            Daemon(place.socket).status()
    assert ended.value.exit_code == 1
    assert "is there but does not answer" in capsys.readouterr().err


def test_a_removal_that_keeps_everything_ends_with_1(place: Place, served: FakeOperations) -> None:
    served.removal = Removal(0, (), ("layer sha256:a: in use by a running container",))
    result = place.ember("rm", "app")
    assert (result.exit_code, result.stdout) == (1, "freed 0 B\n")
    assert result.stderr == "ember: kept layer sha256:a: in use by a running container\n"
    served.removal = Removal(7, ("image sha256:1",), ("layer sha256:a: app:2 has it too",))
    result = place.ember("rm", "app")
    assert (result.exit_code, result.stdout) == (0, "removed image sha256:1\nfreed 7 B\n")
    assert result.stderr == "ember: kept layer sha256:a: app:2 has it too\n"


def test_a_drain_that_is_not_complete_ends_with_1(place: Place, served: FakeOperations) -> None:
    served.states = (DrainState(1, 5, ()), DrainState(1, 5, ("view sha256:v: out of reach",)))
    result = place.ember("drain")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "ember: view sha256:v: out of reach\n" in result.stderr
    assert "1 view is not complete" in result.stderr


def test_a_drain_that_takes_its_time_tells_a_log_what_is_left(
    place: Place, served: FakeOperations
) -> None:
    left = [(2, 9000), (2, 7000), (2, 6000), (1, 3000), (1, 1000), (0, 0)]
    served.states = tuple(DrainState(views, size, ()) for views, size in left)
    result = place.ember("drain")
    assert (result.exit_code, result.stdout) == (0, "everything that is mounted is here\n")
    assert result.stderr == "ember: 2 views, 7.0 kB to fetch\nember: 1 view, 3.0 kB to fetch\n"


def test_a_drain_says_once_why_a_view_does_not_come(place: Place, served: FakeOperations) -> None:
    why = f"view sha256:{'5' * 64} (registry.example/team/app:1) waits: registry: [down]"
    served.states = (DrainState(1, 5, (), (why,)),) * 3 + (DrainState(0, 0, ()),)
    result = place.ember("drain")
    assert result.exit_code == 0
    assert result.stderr == f"ember: {why}\nember: 1 view, 5 B to fetch\n"


def test_an_image_that_is_not_known_ends_with_1(place: Place, served: FakeOperations) -> None:
    result = place.ember("status", "nginx")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "ember: no image 'nginx' is known here; `ember images` lists them\n"
