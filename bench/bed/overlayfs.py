"""containerd's overlayfs snapshotter on a socket of its own, as a proxy snapshotter is.

The program is built from its Go module into the cache folder, once.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from bench.bed.gobin import BUILD_S, CACHE, go
from bench.bed.process import Server, run

SOURCE = Path(__file__).resolve().parent / "served"


def program() -> Path:
    """The built program; renamed into place last, under the version that it was built from."""
    bin_folder = CACHE / "bin"
    bin_folder.mkdir(parents=True, exist_ok=True)
    module = (SOURCE / "go.mod").read_text(encoding="utf-8")
    version = next(line.split()[1] for line in module.splitlines() if "containerd/v2 " in line)
    built = bin_folder / f"overlayfs-served-{version}"
    with (CACHE / "bin.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not built.exists():
            part = built.with_name(f"{built.name}.part")
            environment = {"HOME": os.environ.get("HOME") or "/root", "GOFLAGS": "-buildvcs=false"}
            command = [go(), "build", "-C", str(SOURCE), "-o", str(part), "."]
            run(command, timeout_s=BUILD_S, env=environment)
            part.rename(built)
    return built


class Overlayfs:
    """The served snapshotter, with its root and socket in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "overlayfs.sock"
        self._root = directory / "overlayfs"
        self._log = directory / "overlayfs.log"
        self._server: Server | None = None

    def start(self) -> None:
        self._root.mkdir()
        command = [program(), self._root, self.socket]
        self._server = Server("overlayfs", command, log=self._log)
        self._server.wait_until(self.socket.exists)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
