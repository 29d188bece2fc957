"""The keeper: what it holds outlives whoever gave it, and only its own user may ask for it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ioengine.keeper import PROGRAM, Keeper, KeeperError, SilentKeeperError
from tests.integration.guard_bed import until

pytestmark = pytest.mark.root


@pytest.fixture
def path() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="ember-keeper-"))
    yield directory / "keeper.sock"
    try:
        keeper = Keeper.connect(directory / "keeper.sock")
    except OSError:
        pass
    else:
        with keeper:
            keeper.drop(*keeper.names())
            keeper.quit()
    shutil.rmtree(directory)


@pytest.fixture
def keeper(path: Path) -> Iterator[Keeper]:
    with Keeper.connect_or_start(path, cgroup=None) as keeper:
        yield keeper


def raw(path: Path, packet: bytes, descriptors: list[int] | None = None) -> bytes:
    """What the keeper answers to a packet that our own side would never send."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(10)
        client.connect(str(path))
        socket.send_fds(client, [packet], descriptors or [])
        return client.recv(8192)


def held_by(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def end(pid: int) -> None:
    """Kill a keeper and wait until its lock is free."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}/exe").exists(), f"{pid} is gone")


def test_what_was_put_comes_back_as_the_same_open_file(keeper: Keeper, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "b").write_bytes(b"second")
    with open(tmp_path / "a", "rb") as a, open(tmp_path / "b", "rb") as b:
        keeper.put({"a": a.fileno(), "b": b.fileno()})
    assert sorted(keeper.names()) == ["a", "b"]
    got = keeper.get("b", "a")
    assert got is not None
    assert [os.pread(fd, 10, 0) for fd in got] == [b"second", b"first"]
    assert not any(os.get_inheritable(fd) for fd in got)
    for fd in got:
        os.close(fd)
    assert keeper.get("a", "unknown") is None


def test_a_name_put_again_is_replaced_and_nothing_leaks(keeper: Keeper, tmp_path: Path) -> None:
    pid = keeper.ping().pid
    with open(tmp_path / "f", "wb") as file:
        keeper.put({"x": file.fileno()})
        before = held_by(pid)
        for _ in range(50):
            keeper.put({"x": file.fileno()})
    assert held_by(pid) == before
    keeper.drop("x", "unknown")
    assert keeper.names() == [] and held_by(pid) == before - 1


def test_it_outlives_its_starter_and_the_signals_of_a_stop(path: Path, tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path; from ioengine.keeper import Keeper\n"
        "k = Keeper.connect_or_start(Path(sys.argv[1]), cgroup=None)\n"
        "f = open(sys.argv[2], 'rb'); k.put({'f': f.fileno()}); print(k.ping().pid)"
    )
    (tmp_path / "f").write_bytes(b"kept")
    command = [sys.executable, "-c", text, str(path), str(tmp_path / "f")]
    project = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": project}
    pid = int(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGRTMIN):
        os.kill(pid, number)
    assert os.getsid(pid) != os.getsid(0)
    with Keeper.connect_or_start(path, cgroup=None) as keeper:
        assert keeper.ping().pid == pid and keeper.remarks == ()
        (kept,) = keeper.get("f") or []
        assert os.pread(kept, 4, 0) == b"kept"
        os.close(kept)


def test_it_does_not_end_while_it_holds_anything(keeper: Keeper, tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        keeper.put({"x": file.fileno()})
    with pytest.raises(KeeperError) as caught:
        keeper.quit()
    assert caught.value.errno == errno.EBUSY
    keeper.drop("x")
    keeper.quit()
    until(lambda: not keeper.alive(), "the keeper ends")
    with pytest.raises(KeeperError):
        keeper.ping()


def test_a_second_keeper_on_a_live_socket_is_refused(keeper: Keeper) -> None:
    ended = subprocess.run([str(PROGRAM), str(keeper.path)], capture_output=True, check=False)
    assert ended.returncode == 3 and b"running already" in ended.stderr
    assert keeper.alive() and keeper.names() == []


def test_a_stale_socket_is_taken_over(path: Path) -> None:
    with Keeper.connect_or_start(path, cgroup=None) as first:
        pid = first.ping().pid
        end(pid)
    assert path.exists()
    with Keeper.connect_or_start(path, cgroup=None) as second:
        assert second.ping().pid != pid


def test_a_removed_socket_of_a_live_keeper_is_named(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ioengine.keeper.TIMEOUT_S", 0.3)
    keeper.path.unlink()
    with pytest.raises(KeeperError, match=r"keeper\.sock\.lock"):
        Keeper.connect_or_start(keeper.path, cgroup=None)
    keeper.quit()


def test_a_keeper_that_stands_still_is_named_and_told_from_none(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ioengine.keeper.TIMEOUT_S", 0.3)
    pid = keeper.ping().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(SilentKeeperError, match=rf"process {pid}\) did not answer"):
            Keeper.connect_or_start(keeper.path, cgroup=None)
    finally:
        os.kill(pid, signal.SIGCONT)
    with Keeper.connect(keeper.path) as again:
        assert again.ping().pid == pid


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(KeeperError, match="cannot start"):
        Keeper.connect_or_start(tmp_path / "s", program=tmp_path / "missing")
    with pytest.raises(KeeperError, match="usage"):
        Keeper.connect_or_start(tmp_path / "s", cgroup="../up")
    missing = tmp_path / "no" / "where"
    with pytest.raises(KeeperError, match="cannot open"):
        Keeper.connect_or_start(missing, cgroup=None)
    assert not (tmp_path / "s").exists()


def test_malformed_packets_are_answered_and_their_descriptors_closed(
    keeper: Keeper, tmp_path: Path
) -> None:
    pid = keeper.ping().pid
    before = held_by(pid)
    long = b"x" * 64
    with open(tmp_path / "f", "wb") as file:
        fd = file.fileno()
        packets: list[tuple[bytes, list[int]]] = [
            (b"put a b", [fd]),
            (b"put a", [fd, fd]),
            (b"put", [fd]),
            (b"put a a", [fd, fd]),
            (b"put " + long, [fd]),
            (b"put a/b", [fd]),
            (b"put \xff", [fd]),
            (b"get", []),
            (b"nonsense", [fd]),
            (b"   ", []),
            (b"list\n", [fd]),
            (b" ".join([b"get"] + [b"n"] * 40), []),
            (b"x" * 9000, []),
            (b"put a", [fd] * 200),
        ]
        for packet, descriptors in packets:
            assert raw(keeper.path, packet, descriptors).startswith(b"bad "), packet[:20]
    assert keeper.names() == []
    until(lambda: held_by(pid) == before, "no descriptor stays behind")


def test_it_is_never_more_than_full(keeper: Keeper, tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        for first in range(0, 64, 16):
            keeper.put({f"n{first + i}": file.fileno() for i in range(16)})
        with pytest.raises(KeeperError, match="full"):
            keeper.put({"n0": file.fileno(), "more": file.fileno()})
        keeper.put({"n0": file.fileno()})
    assert len(keeper.names()) == 64 and "more" not in keeper.names()


def test_more_clients_than_it_serves_are_turned_away_and_then_served(keeper: Keeper) -> None:
    clients = []
    for _ in range(80):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(str(keeper.path))
        client.settimeout(10)
        clients.append(client)
    assert clients[-1].recv(100) == b"bad too many clients"
    assert keeper.names() == []
    for client in clients:
        client.close()

    def has_room() -> bool:
        Keeper.connect(keeper.path).close()
        return True

    until(has_room, "there is room again")


def test_another_user_gets_nothing(keeper: Keeper) -> None:
    keeper.path.parent.chmod(0o755)
    keeper.path.chmod(0o666)
    text = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "print(s.recv(100).decode())"
    )
    command = [sys.executable, "-I", "-c", text, str(keeper.path)]
    answered = subprocess.run(command, capture_output=True, check=True, timeout=20).stdout
    assert answered.strip() == b"bad user"
    assert keeper.path.stat().st_uid == 0


def test_it_leaves_the_control_group_of_its_starter(path: Path) -> None:
    name = f"ember-keeper-test-{os.getpid()}"
    with Keeper.connect_or_start(path, cgroup=name) as keeper:
        status = keeper.ping()
        assert status.own_cgroup, keeper.remarks
        groups = Path(f"/proc/{status.pid}/cgroup").read_text(encoding="ascii")
        assert f"/{name}\n" in groups
        end(status.pid)
    mounts = Path("/proc/self/mountinfo").read_text(encoding="ascii", errors="replace")
    points = [line.split()[4] for line in mounts.splitlines() if " - cgroup" in line]
    for point in points:
        if (group := Path(point) / name).is_dir():
            group.rmdir()
