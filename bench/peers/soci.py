"""SOCI: the image as it is, and beside it an index, which a rewritten manifest names (v2)."""

from __future__ import annotations

from pathlib import Path

from bench.bed.containerd import Containerd
from bench.bed.image import Image
from bench.peers.peer import Peer
from bench.touched import Touched

CONFIGURATION = """\
no_prometheus = true
[background_fetch]
disable = true
[content_store]
type = "containerd"
containerd_address = "{address}"
"""


class Soci(Peer):
    name = "soci"
    programs = ("soci-snapshotter-grpc", "soci")

    def configuration(self, containerd: Containerd) -> str:
        return CONFIGURATION.format(address=containerd.address)

    def command(self, configuration: Path) -> list[str]:
        words = ["soci-snapshotter-grpc", "--address", str(self.socket), "--root", str(self.root)]
        return [*words, "--config", str(configuration)]

    def convert(self, containerd: Containerd, image: Image, target: str, what: Touched) -> None:
        words = ["soci", "--address", str(containerd.address), "--namespace", containerd.namespace]
        self.tool(*words, "convert", image.reference, target)
        self.push(containerd, target)
