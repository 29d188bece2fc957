"""A private containerd of the bed: Debian's 1.6 or a 2.x, with overlayfs and, if asked, Ember.

Root, state and sockets are in the bed's directory; the containerd namespace has the bed's name, so
that control groups and runc's state can be told from everybody else's. It runs on the bed's link.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bed.gobin import containerd2
from bench.bed.link import Link
from bench.bed.process import BedError, Server, run

PULL_S = 600.0
CONFIG_1 = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.internal.v1.opt"]
[grpc]
address = "{address}"
[ttrpc]
address = "{address}.ttrpc"
"""
CONFIG_2 = """\
version = 3
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
  "io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]
[plugins."io.containerd.server.v1.grpc"]
address = "{address}"
[plugins."io.containerd.server.v1.ttrpc"]
address = "{address}.ttrpc"
[grpc]
address = "{address}"
[ttrpc]
address = "{address}.ttrpc"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "{platform}"
snapshotter = "overlayfs"
"""
EMBER_1 = """\
[proxy_plugins.ember]
type = "snapshot"
address = "{socket}"
"""
PROXY_2 = """\
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "{{platform}}"
snapshotter = "{name}"
[proxy_plugins.{name}]
type = "snapshot"
address = "{socket}"
[proxy_plugins.{name}.exports]
root = "{root}"
enable_remote_snapshot_annotations = "true"
"""
CRI_1 = """\
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "ember"
disable_snapshot_annotations = false
"""
CRI_2 = """\
[plugins."io.containerd.cri.v1.images"]
snapshotter = "ember"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
"""
CRI_PLUGINS = {
    1: ('"io.containerd.grpc.v1.cri", ', CRI_1),
    2: (
        '"io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",\n'
        '  "io.containerd.grpc.v1.cri", ',
        CRI_2,
    ),
}


@dataclass(frozen=True)
class Started:
    """How a container came up: seconds from `ctr run` to its first line, to its end; its output."""

    ready_s: float
    ended_s: float
    output: str


class Containerd:
    """One containerd; ``major`` 1 is Debian's, 2 is built from its Go module.

    ``proxies`` are snapshotters besides Ember: socket and root by name.
    """

    def __init__(
        self,
        directory: Path,
        link: Link,
        *,
        major: int = 1,
        ember_socket: Path | None = None,
        ember_root: Path | None = None,
        pause: str = "",
        proxies: Mapping[str, tuple[Path, Path]] | None = None,
    ) -> None:
        self.directory = directory / f"containerd{major}"
        self.link = link
        self.major = major
        self.namespace = link.name
        self.address = self.directory / "containerd.sock"
        self._ember = (ember_socket, ember_root)
        self._pause = pause
        self._proxies = dict(proxies or {})
        if self._proxies and major == 1:
            raise BedError("only containerd 2.x has other snapshotters than ours in the bed")
        if major == 2 and ember_socket:
            self._proxies["ember"] = (ember_socket, ember_root or ember_socket.parent)
        self._binaries = Path("/usr/bin") if major == 1 else containerd2()
        self._server: Server | None = None
        self._serial = itertools.count()

    @property
    def pid(self) -> int:
        if self._server is None:
            raise BedError("containerd is not running")
        return self._server.pid

    def configuration(self) -> str:
        text = CONFIG_1 if self.major == 1 else CONFIG_2
        ember_socket, _ = self._ember
        if ember_socket is not None and self.major == 1:
            text += EMBER_1
        for name, (address, root) in self._proxies.items():
            text += PROXY_2.format(name=name, socket=address, root=root)
        if self._pause:
            disabled, enabled = CRI_PLUGINS[self.major]
            text = text.replace(disabled, "") + enabled
        return text.format(
            root=self.directory / "root",
            state=self.directory / "state",
            address=self.address,
            platform=f"linux/{run(['dpkg', '--print-architecture']).strip()}",
            socket=ember_socket,
            pause=self._pause,
        )

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "config.toml"
        path.write_text(self.configuration(), encoding="utf-8")
        environment = {"PATH": f"{self._binaries}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        binary = str(self._binaries / "containerd")
        command = [*self.link.enter(), binary, "--config", str(path)]
        self._server = Server(
            f"containerd {self.major}.x",
            command,
            log=self.directory / "log",
            env=environment,
        )
        self._server.wait_until(self._answers)

    def _answers(self) -> bool:
        if not self.address.exists():
            return False
        try:
            self.ctr("version", timeout_s=5)
        except BedError:
            return False
        return True

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kill(self) -> None:
        """Kill -9, as a crash would; containers and shims live on. ``start`` brings it back."""
        if self._server is not None:
            self._server.kill()
            self._server = None

    def command(self, *words: str | Path) -> list[str]:
        """``ctr`` on the link, talking to this containerd in the bed's namespace."""
        ctr = [str(self._binaries / "ctr"), "--address", str(self.address)]
        return [*self.link.enter(), *ctr, "--namespace", self.namespace, *map(str, words)]

    def ctr(self, *words: str | Path, timeout_s: float = 60.0) -> str:
        return run(self.command(*words), timeout_s=timeout_s)

    def pull(self, reference: str, snapshotter: str = "overlayfs") -> float:
        """Pull and unpack; seconds."""
        words = ["images", "pull", "--snapshotter", snapshotter]
        if self.major == 2:
            words.append("--plain-http")
        start = time.monotonic()
        self.ctr(*words, reference, timeout_s=PULL_S)
        return time.monotonic() - start

    def start_container(
        self,
        reference: str,
        command: Sequence[str] = (),
        *,
        snapshotter: str = "overlayfs",
        ready: str = "ready",
        when_ready: Callable[[], object] = lambda: None,
        timeout_s: float = PULL_S,
    ) -> Started:
        """Run a container to its end; BedError unless a line ``ready`` came and it ended with 0."""
        identity = f"{self.namespace}-{os.getpid()}-{next(self._serial)}"
        words = ["run", "--rm", "--snapshotter", snapshotter, "--fifo-dir"]
        words.append(str(self.directory / "fifo"))
        log = self.directory / "run.log"
        limited = ["timeout", "-k", "5", str(timeout_s)]
        limited += self.command(*words, reference, identity, *command)
        start = time.monotonic()
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                limited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            ) as process,
        ):
            if process.stdout is None:
                raise BedError("no pipe to ctr")
            lines = []
            ready_s = 0.0
            try:
                for line in process.stdout:
                    lines.append(line.decode(errors="replace"))
                    if not ready_s and lines[-1].strip() == ready:
                        ready_s = time.monotonic() - start
                        when_ready()
            except BaseException:
                process.kill()  # the bed ends the container itself
                raise
        ended_s = time.monotonic() - start
        output = "".join(lines)
        if process.returncode or not ready_s:
            said = log.read_text(errors="replace")[-2000:]
            raise BedError(
                f"container of {reference} ended with {process.returncode}, "
                f"{'' if ready_s else 'never '}ready after {ended_s:.1f} s: {output[-500:]} {said}"
            )
        return Started(ready_s, ended_s, output)

    def remove_image(self, reference: str) -> None:
        """Remove an image and, with it, its content and snapshots."""
        self.ctr("images", "rm", "--sync", reference)

    def collect_garbage(self) -> None:
        """Make containerd collect now what nothing refers to: a lease's end does it."""
        lease = self.ctr("leases", "create").strip()
        self.ctr("leases", "rm", "--sync", lease)

    def holds_nothing(self) -> bool:
        return not self.ctr("content", "ls", "-q").strip()

    def clear(self) -> None:
        """Forget everything: stop, remove root and state."""
        self.stop()
        shutil.rmtree(self.directory / "root", ignore_errors=True)
        shutil.rmtree(self.directory / "state", ignore_errors=True)
