"""eStargz: the image converted, file by file compressed, with what a start touches put first."""

from __future__ import annotations

import json
from pathlib import Path

from bench.bed.containerd import Containerd
from bench.bed.image import Image
from bench.peers.peer import Peer
from bench.touched import Touched

CONFIGURATION = """\
no_prometheus = true
no_background_fetch = true
"""


class Stargz(Peer):
    name = "stargz"
    programs = ("containerd-stargz-grpc", "ctr-remote")

    def configuration(self, containerd: Containerd) -> str:
        return CONFIGURATION

    def command(self, configuration: Path) -> list[str]:
        words = ["containerd-stargz-grpc", "--address", str(self.socket)]
        return [*words, "--root", str(self.root), "--config", str(configuration)]

    def convert(self, containerd: Containerd, image: Image, target: str, what: Touched) -> None:
        """Convert with a record of what is touched, in the form that `optimize` writes it."""
        record = self.directory / "record"
        self.directory.mkdir(exist_ok=True)
        rows = [
            {"path": name, "manifestDigest": image.manifest_digest, "layerIndex": place.layer}
            for name, place in what.files
        ]
        record.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        words = ["ctr-remote", "--address", str(containerd.address)]
        words += ["--namespace", containerd.namespace, "images", "convert", "--oci", "--estargz"]
        words += ["--estargz-record-in", str(record), image.reference, target]
        self.tool(*words)
        self.push(containerd, target)
