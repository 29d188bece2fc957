"""Ember in the bed: the daemon from this tree on the bed's link, reached by its command line.

Nothing here imports the daemon's packages: a measurement uses what a user has, and what is not
configured here is as it is for users.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.bed.link import Link
from bench.bed.process import BedError, Server, run

ROOT = Path(__file__).resolve().parents[2]
PULL_S = 600.0


class Ember:
    """One daemon; create it before the containerd that is to use it, start it after."""

    def __init__(self, directory: Path, link: Link, containerd_address: Path) -> None:
        self.directory = directory / "ember"
        self.root = self.directory / "root"
        self.state = self.directory / "state"
        self.socket = self.state / "ember.sock"
        self.link = link
        self._containerd_address = containerd_address
        self._server: Server | None = None
        self.namespace = link.name
        self.program: tuple[str, ...] = ("snapshotter.cli.main",)
        """The module that is started, and words that stand before the command."""
        self.environment: dict[str, str] = {}
        """What the daemon is started with, over this process's own."""

    @property
    def pid(self) -> int:
        if self._server is None:
            raise BedError("ember is not running")
        return self._server.pid

    @property
    def configuration(self) -> Path:
        return self.directory / "config.toml"

    def configure(
        self,
        *,
        first_pull: str = "stream",
        completion: bool | None = None,
        sections: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Write the configuration; ``sections`` are tables whose keys go over the bed's own.

        Without ``completion`` bytes that are counted were asked for by a reader.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        tables: dict[str, Mapping[str, object]] = {
            "containerd": {"address": str(self._containerd_address)},
            "first_pull": {"mode": first_pull},
        }
        if completion is not None:
            tables["completion"] = {"enabled": completion}
        lines = [f'root = "{self.root}"', f'state = "{self.state}"']
        for name, table in (sections or {}).items():
            tables[name] = {**tables.get(name, {}), **table}
        for name, table in tables.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        self.configuration.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def start(self) -> None:
        """Start the daemon and wait until it answers (its configuration is made if need be)."""
        self.launch().wait_until(self._answers)

    def launch(self) -> Server:
        """Start the daemon without waiting for it."""
        if not self.configuration.exists():
            self.configure()
        python = [sys.executable, "-B", "-m", *self.program]
        self._server = Server(
            "ember serve",
            [*self.link.enter(), *python, "serve", "--config", str(self.configuration)],
            log=self.directory / "log",
            env=self.environment,
            cwd=ROOT,
        )
        return self._server

    def _answers(self) -> bool:
        try:
            if not stat.S_ISSOCK(self.socket.stat().st_mode):
                return False
            self.command("status", "--json", timeout_s=10)
        except (OSError, BedError):
            return False
        return True

    def stop(self) -> None:
        """SIGTERM; mounts, keeper and running containers stay, as they must."""
        if self._server is not None:
            self._server.stop(timeout_s=30)
            self._server = None

    def wait_for_its_end(self, limit_s: float = 30.0) -> int:
        """Wait until the daemon has ended by itself; its exit status, -9 for SIGKILL."""
        if self._server is None:
            raise BedError("ember is not running")
        status = self._server.process.wait(limit_s)
        self._server = None
        return status

    def kill(self) -> None:
        """Kill -9, as a crash would."""
        if self._server is not None:
            self._server.kill()
            self._server = None

    def command(self, verb: str, *words: str, timeout_s: float = 60.0) -> str:
        """Run `ember VERB ...` against this daemon; what it printed."""
        ember = [sys.executable, "-B", "-m", "snapshotter.cli.main", verb]
        environment = {"PYTHONPATH": str(ROOT)}
        return run(
            [*self.link.enter(), *ember, "--config", str(self.configuration), *words],
            timeout_s=timeout_s,
            env=environment,
        )

    def pull(self, reference: str) -> float:
        """`ember pull`; seconds."""
        start = time.monotonic()
        self.command("pull", "--namespace", self.namespace, reference, timeout_s=PULL_S)
        return time.monotonic() - start

    def warm(self, reference: str) -> float:
        """`ember warm`: bring all bytes of an image here; seconds."""
        start = time.monotonic()
        self.command("warm", "--json", reference, timeout_s=PULL_S)
        return time.monotonic() - start

    def share_index(self, reference: str) -> float:
        """`ember index build --push`: as a build machine would, asking no daemon; seconds."""
        start = time.monotonic()
        words = [sys.executable, "-B", "-m", "snapshotter.cli.main", "index", "build", "--push"]
        environment = {"PYTHONPATH": str(ROOT)}
        words += ["--cache", str(self.directory / "built")]
        run([*self.link.enter(), *words, reference], timeout_s=PULL_S, env=environment)
        return time.monotonic() - start

    def drop_data(self, reference: str) -> None:
        """Forget the image's bytes and keep its index."""
        self.command("rm", "--data", "--namespace", self.namespace, reference)

    def remove(self, reference: str) -> None:
        """Forget the image wholly, index included."""
        self.command("rm", "--namespace", self.namespace, reference)

    def complete(self) -> float:
        """Fetch the rest of everything that is mounted; seconds."""
        start = time.monotonic()
        self.command("drain", timeout_s=PULL_S)
        return time.monotonic() - start

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.command("status", "--json"))
        return document

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def memory_bytes(self) -> int:
        """Resident memory of the daemon."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
