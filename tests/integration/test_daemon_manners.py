"""The daemon as a service: what it tells its manager, what it makes of odd places, a full disk.

Each place that a cache can't be lazy on still serves images, whole, and the reason is shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from bench.bed.bed import Bed
from bench.bed.link import Shape
from bench.bed.process import BedError
from ioengine.mounts import unmount
from tests.conformance.snapshots.whole import end_keeper
from tests.node import Node, node
from tests.readers import ended_well, noisy, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

GROUP = "anon_inode:[fanotify]"


@contextlib.contextmanager
def node_on(
    cache: Path,
    root: Path,
    more: str = "",
    environment: dict[str, str] | None = None,
    *,
    completion: bool | None = None,
) -> Iterator[Node]:
    """A node whose Ember keeps its cache in ``root``; ``more`` goes around its configuration."""
    with Bed(Shape(0), cache=cache) as bed:
        ember = bed.ember(1)
        ember.root = root
        ember.environment.update(environment or {})
        ember.configure(completion=completion)
        keys, bracket, tables = more.partition("[")
        text = ember.configuration.read_text()
        ember.configuration.write_text(keys + text + bracket + tables)
        containerd = bed.containerd(1, ember_socket=ember.socket, ember_root=ember.root)
        ember.start()
        with Node(bed, ember, containerd) as made:
            yield made


@contextlib.contextmanager
def mounted(kind: str, source: str, target: Path, options: str) -> Iterator[Path]:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, source, str(target)], check=True)
    try:
        yield target
    finally:
        unmount(target, detach=True)


@contextlib.contextmanager
def small_ext4(directory: Path, size_bytes: int) -> Iterator[Path]:
    image = directory / "disk"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    # Space that was freed is there with the next commit of the journal: soon.
    with mounted("ext4", str(image), directory / "small", "loop,commit=1") as target:
        yield target


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_cache_on_a_file_system_without_events_serves_images_whole_and_says_why(
    tmp_path: Path, kind: str
) -> None:
    case = noisy(f"on{kind}", size=50_000)
    options = "size=200m"
    if kind == "overlay":
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        below = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        options = below
    with (
        mounted(kind, kind, tmp_path / "root", options) as root,
        node_on(tmp_path / "cache", root) as ours,
    ):
        assert ours.status()["daemon"]["data_path"]["name"] is None
        reasons = " ".join(ours.status()["daemon"]["data_path"]["reasons"])
        assert kind in reasons
        case.push(ours.bed.registry)
        pulled = ours.pull(case.reference)
        assert pulled.lazy_layers == 0
        assert kind in pulled.reason
        assert kind in ours.image(case.reference)["reason"]


def reads(path: Path, wanted: str) -> bool:
    return ended_well(reader(path, wanted)) == ""


def test_a_full_disk_never_hangs_a_reader_and_heals_when_there_is_space(tmp_path: Path) -> None:
    case = noisy("full", size=6_000_000)
    names = sorted(case.rows)
    with (
        small_ext4(tmp_path, 64 * 2**20) as root,
        node_on(tmp_path / "cache", root, "[cache]\nballast = 0\n") as ours,
    ):
        case.push(ours.bed.registry)
        assert ours.pull(case.reference).lazy_layers == 2
        with ours.mounted(case.chain_id):
            pass
        assert not ours.drop(case.reference).kept
        with ours.mounted(case.chain_id) as seen:
            filler = root / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**20))
            failed = reader(seen / names[0], sha256_of(case, names[0]))
            said = ended_well(failed, 60)
            assert "Input/output error" in said or "No space left" in said
            assert ours.until(lambda: "no space" in ours.ember.log().lower())
            filler.unlink()
            # The file system gives the space back with its next commit, some seconds later.
            for name in names:
                assert ours.until(partial(reads, seen / name, sha256_of(case, name)), 60)


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(path))
    listener.settimeout(30)
    return listener


def serve(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    config = tmp_path / "config.toml"
    if not config.exists():
        config.write_text(f'root = "{tmp_path}/root"\nstate = "{tmp_path}/s"\nlazy.mode = "off"\n')
    return subprocess.Popen(
        [sys.executable, "-B", "-m", "snapshotter.cli.main", "serve", "--config", str(config)],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_service_manager_is_told_ready_reloading_and_stopping(tmp_path: Path) -> None:
    with listen(tmp_path / "notify") as manager:
        daemon = serve(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"))
        try:
            ready = manager.recv(4096).decode()
            assert "READY=1" in ready
            assert f"MAINPID={daemon.pid}" in ready
            assert (tmp_path / "s" / "ember.sock").is_socket()
            config = tmp_path / "config.toml"
            config.write_text(config.read_text() + '[fetch]\nmiss_timeout = "soon"\n')
            daemon.send_signal(signal.SIGHUP)
            assert "RELOADING=1" in (reloading := manager.recv(4096).decode())
            assert "MONOTONIC_USEC=" in reloading
            assert manager.recv(4096).decode() == "READY=1"
            daemon.send_signal(signal.SIGTERM)
            assert "STOPPING=1" in manager.recv(4096).decode()
            _, log = daemon.communicate(timeout=30)
            assert daemon.returncode == 0
            assert "fetch.miss_timeout: 'soon' is not a duration" in log
            assert "the configuration stays as it was" in log
            assert not (tmp_path / "s" / "ember.sock").exists()
        finally:
            daemon.kill()
            daemon.wait()


def test_a_reload_under_waiting_readers_changes_what_can_be_and_disturbs_nobody(
    tmp_path: Path,
) -> None:
    """With lazy layers, and a service manager that is told of each step."""
    case = noisy("reloaded", size=300_000)
    with (
        listen(tmp_path / "notify") as manager,
        node(tmp_path) as ours,
    ):
        ours.ember.stop()
        ours.ember.environment["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        ours.start_again()
        assert ready_from(manager) == ours.ember.pid
        case.push(ours.bed.registry)
        ours.pull(case.reference)
        with ours.mounted(case.chain_id):
            pass
        assert ours.until(lambda: not ours.drop(case.reference).kept)
        with ours.mounted(case.chain_id) as root:
            with ours.bed.registry.hanging():
                readers = [reader(root / name, sha256_of(case, name)) for name in case.rows]
                assert ours.until(lambda: ours.status()["guard"]["outstanding"] > 0)
                for text in ('log_level = "debug"\n', 'log_level = "loud"\n'):
                    config = ours.ember.configuration
                    lines = config.read_text().splitlines(keepends=True)
                    kept = [line for line in lines if not line.startswith("log_level")]
                    config.write_text(text + "".join(kept))
                    os.kill(ours.ember.pid, signal.SIGHUP)
                    assert "RELOADING=1" in manager.recv(4096).decode()
                    assert manager.recv(4096).decode() == "READY=1"
                assert "configuration read again\n" in ours.ember.log()
                assert "the configuration stays as it was" in ours.ember.log()
                assert [each.poll() for each in readers] == [None] * len(readers)
            assert [ended_well(each) for each in readers] == [""] * len(readers)
            ours.ember.stop()
            assert "STOPPING=1" in manager.recv(4096).decode()


def ready_from(manager: socket.socket) -> int:
    """The process that says that it is ready, once it has given away what must be held."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(manager, 4096, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        if b"READY=1" in message:
            fields = dict(line.split("=", 1) for line in message.decode().splitlines())
            return int(fields["MAINPID"])


def test_a_reload_that_comes_during_the_start_waits_for_its_end(tmp_path: Path) -> None:
    with listen(tmp_path / "notify") as manager:
        daemon = serve(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"))
        try:
            while not (tmp_path / "root" / "lock").exists():
                assert daemon.poll() is None
                os.sched_yield()
            daemon.send_signal(signal.SIGHUP)
            assert f"MAINPID={daemon.pid}" in manager.recv(4096).decode()
            assert "RELOADING=1" in manager.recv(4096).decode()
            assert manager.recv(4096).decode() == "READY=1"
        finally:
            daemon.kill()
            daemon.communicate()


def test_a_wrong_configuration_ends_the_start_with_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[fetch]\nspeed = 1\n")
    daemon = serve(tmp_path)
    _, said = daemon.communicate(timeout=30)
    assert daemon.returncode == 2
    assert said.strip().startswith(f"ember: {tmp_path}/config.toml: fetch.speed: no such key")


def test_the_service_manager_holds_the_guard_too(tmp_path: Path) -> None:
    """systemd's store, spoken for real: what was given comes back to the next daemon."""
    (tmp_path / "config.toml").write_text(
        f'root = "{tmp_path}/root"\nstate = "{tmp_path}/s"\n'
        f'[cri_proxy]\naddress = "{tmp_path}/s/cri.sock"\n'
    )
    with listen(tmp_path / "notify") as manager:
        daemon = serve(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"))
        held: dict[str, int] = {}
        try:
            while True:
                message, descriptors, _, _ = socket.recv_fds(manager, 4096, 4)
                if b"READY=1" in message:
                    break
                fields = dict(line.split("=") for line in message.decode().splitlines())
                assert fields["FDSTORE"] == "1"
                assert fields["FDPOLL"] == "0"
                held[fields["FDNAME"]] = descriptors[0]
            assert sorted(held) == ["guard-group", "guard-journal", "pull-secrets"]
            assert str(Path(f"/proc/self/fd/{held['guard-group']}").readlink()) == GROUP
        finally:
            daemon.kill()
            daemon.communicate()
            for descriptor in held.values():
                os.close(descriptor)
            end_keeper(tmp_path / "s" / "keeper.sock")
            unmount(tmp_path / "s" / "guarded", detach=True)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def test_a_second_daemon_on_the_same_cache_goes_away_and_says_why(fresh: Node) -> None:
    config = fresh.ember.configuration
    second = subprocess.run(
        [sys.executable, *["-B", "-m", "snapshotter.cli.main", "serve", "--config"], str(config)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 1
    assert "another daemon works on" in second.stderr
    assert "Traceback" not in second.stderr
    assert fresh.status()["daemon"]["pid"] == fresh.ember.pid


def test_a_stale_socket_is_taken_over(fresh: Node) -> None:
    fresh.ember.kill()
    assert fresh.ember.socket.exists()
    fresh.start_again()
    assert fresh.status()["images"] == []


def test_a_daemon_without_leave_to_write_its_cache_says_so(fresh: Node, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(f'root = "{tmp_path}/file/below"\nstate = "{tmp_path}/state"\n')
    (tmp_path / "file").write_text("not a directory")
    started = subprocess.run(
        [sys.executable, "-B", "-m", "snapshotter.cli.main", "serve", "--config", str(wrong)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert started.returncode == 1
    assert "can't be used as cache" in started.stderr
    assert "Traceback" not in started.stderr


def test_commands_without_a_daemon_say_so_and_exit_with_3(fresh: Node) -> None:
    fresh.ember.stop()
    with pytest.raises(BedError, match="exit status 3: ember: no daemon answers"):
        fresh.ember.command("images")
    with pytest.raises(grpc.RpcError):
        fresh.status()


def test_a_pull_into_a_namespace_that_was_never_used_works(fresh: Node) -> None:
    case = noisy("elsewhere", size=100_000)
    case.push(fresh.bed.registry)
    assert fresh.pull(case.reference, namespace="another").lazy_layers == 2
    with fresh.mounted(case.chain_id, namespace="another") as root:
        name = min(case.rows)
        assert hashlib.sha256((Path(root) / name).read_bytes()).hexdigest() == sha256_of(case, name)
