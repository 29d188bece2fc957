"""Programs that no Debian package has, built from their Go modules into the cache folder.

A finished build is renamed into place last, under a name with its version; a lock lets two runs at
once build only one of them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path

from bench.bed.process import BedError, run

CACHE = Path(__file__).resolve().parents[2] / ".cache"
CONTAINERD = "github.com/containerd/containerd/v2"
CONTAINERD_VERSION = "v2.4.2"
CONTAINERD_TAGS = "no_btrfs no_zfs no_devmapper"
PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2")
BUILD_S = 1200.0


def go() -> str:
    """Where the Go tool is: on the path, in the usual place, or the wheel in our environment."""
    beside = Path(sys.executable).parent / "go"
    for found in (shutil.which("go"), "/usr/local/go/bin/go", str(beside)):
        if found and Path(found).exists():
            return found
    raise BedError("no Go here; `make deps` installs it into the virtual environment")


def containerd2() -> Path:
    """The folder with containerd 2.x, ctr and the shim; built on the first call (minutes)."""
    folder = CACHE / "bin" / f"containerd-{CONTAINERD_VERSION}"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "bin.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        modules = [f"{CONTAINERD}/cmd/{name}@{CONTAINERD_VERSION}" for name in PROGRAMS]
        environment = {"GOBIN": str(part), "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "1"}
        home = os.environ.get("HOME") or "/root"
        run(
            [go(), "install", "-tags", CONTAINERD_TAGS, *modules],
            timeout_s=BUILD_S,
            env={**environment, "HOME": home},
        )
        part.rename(folder)
    return folder


if __name__ == "__main__":
    print(containerd2())
