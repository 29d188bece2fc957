"""Nydus through FUSE: the image converted to RAFS v6, no prefetch.

Each image has a nydusd of its own, a child of the snapshotter: what it costs counts too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.bed.containerd import Containerd
from bench.bed.image import Image
from bench.bed.process import BedError
from bench.peers.peer import Peer
from bench.touched import Touched

CONFIGURATION = """\
version = 1
root = "{root}"
address = "{socket}"
daemon_mode = "dedicated"
cleanup_on_close = true
[system]
enable = false
[daemon]
nydusd_config = "{nydusd_config}"
nydusd_path = "{nydusd}"
nydusimage_path = "{image}"
fs_driver = "fusedev"
recover_policy = "none"
threads_number = 4
[cgroup]
enable = false
[log]
log_to_stdout = true
level = "info"
[metrics]
address = ""
[cache_manager]
disable = false
[remote]
convert_vpc_registry = false
"""
NYDUSD = {
    "device": {
        "backend": {"type": "registry", "config": {"scheme": "http", "timeout": 30}},
        "cache": {"type": "blobcache", "config": {"work_dir": ""}},
    },
    "mode": "direct",
    "digest_validate": False,
    "iostats_files": False,
    "enable_xattr": True,
    "fs_prefetch": {"enable": False, "threads_count": 1, "merging_size": 1048576},
}


# It asks for a million files, and ends where that is more than the hard limit allows.
WRAPPED = """\
#!/bin/sh
set -e
exec {nydusd} "$@" --rlimit-nofile 0
"""


def path_of(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise BedError(f"{program}: not on the path any more")
    return found


class Nydus(Peer):
    name = "nydus"
    programs = ("containerd-nydus-grpc", "nydusd", "nydus-image", "nydusify")

    def configuration(self, containerd: Containerd) -> str:
        nydusd = self.directory / "nydusd"
        nydusd.write_text(WRAPPED.format(nydusd=path_of("nydusd")), encoding="utf-8")
        nydusd.chmod(0o755)
        nydusd_config = self.directory / "nydusd.json"
        nydusd_config.write_text(json.dumps(NYDUSD), encoding="utf-8")
        return CONFIGURATION.format(
            root=self.root,
            socket=self.socket,
            nydusd_config=nydusd_config,
            nydusd=nydusd,
            image=path_of("nydus-image"),
        )

    def command(self, configuration: Path) -> list[str]:
        return ["containerd-nydus-grpc", "--config", str(configuration)]

    def convert(self, containerd: Containerd, image: Image, target: str, what: Touched) -> None:
        """`nydusify` goes from registry to registry and asks no containerd."""
        self.directory.mkdir(exist_ok=True)
        words = ["nydusify", "convert", "--source", image.reference, "--target", target]
        words += ["--fs-version", "6", "--work-dir", str(self.directory / "work")]
        self.tool(*words)
