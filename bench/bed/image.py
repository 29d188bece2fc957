"""OCI images as files: layers made from folders, their config and manifest, kept in a cache.

A layer is packed with sorted names, so the same folder gives the same digest. The folder of an
image holds `blobs/sha256/...`, `manifest.json` and `layers.json`; a `.part` folder is renamed last,
so a killed build leaves nothing that looks whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.bed.process import BedError, run
from bench.bed.registry import HOST, Pusher, Registry

OCI = "application/vnd.oci.image"
LAYER_TYPES = {
    "gzip": f"{OCI}.layer.v1.tar+gzip",
    "fast": f"{OCI}.layer.v1.tar+gzip",
    "zstd": f"{OCI}.layer.v1.tar+zstd",
}
COMPRESSORS = {
    "gzip": ["pigz", "-n", "-6", "-p", "2"],
    "fast": ["pigz", "-n", "-1", "-p", "2"],  # gzip too, for what does not shrink anyway
    "zstd": ["zstd", "-q", "-3", "-T2"],
    "plain": ["cat"],
}
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Layer:
    digest: str
    diff_id: str
    size: int
    plain_size: int
    media_type: str


@dataclass(frozen=True)
class Image:
    """A built image: where it lies, and its reference in the bed's registry once pushed."""

    name: str
    tag: str
    folder: Path
    manifest_digest: str
    layers: tuple[Layer, ...]

    @property
    def reference(self) -> str:
        return f"{HOST}/{self.name}:{self.tag}"

    @property
    def size(self) -> int:
        """Compressed bytes of all layers."""
        return sum(layer.size for layer in self.layers)

    @property
    def plain_size(self) -> int:
        return sum(layer.plain_size for layer in self.layers)

    def push(self, registry: Registry) -> None:
        pusher = Pusher(registry, self.name)
        manifest = (self.folder / "manifest.json").read_bytes()
        for part in [json.loads(manifest)["config"], *json.loads(manifest)["layers"]]:
            pusher.blob(part["digest"], blob_path(self.folder, part["digest"]))
        pusher.manifest(self.tag, manifest)


def blob_path(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def add_blob(folder: Path, content: bytes) -> tuple[str, int]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    blob_path(folder, digest).write_bytes(content)
    return digest, len(content)


def pack(tree: Path, folder: Path, compression: str) -> Layer:
    """Pack the content of ``tree`` as one layer blob in ``folder``."""
    names = sorted(entry.name for entry in tree.iterdir())
    archive = ["tar", "--sort=name", "--numeric-owner", "--format=pax", "--xattrs"]
    archive += ["--pax-option=delete=atime,delete=ctime", "-C", str(tree), "-c", "--", *names]
    part = blob_path(folder, f"part-{tree.name}-{compression}")
    diff_id = hashlib.sha256()
    plain_size = 0
    with (
        part.open("wb") as output,
        subprocess.Popen(archive, stdout=subprocess.PIPE) as tar,
        subprocess.Popen(
            COMPRESSORS[compression], stdin=subprocess.PIPE, stdout=output
        ) as compressor,
    ):
        if tar.stdout is None or compressor.stdin is None:
            raise BedError("no pipe to tar or to the compressor")
        while block := tar.stdout.read(BLOCK_BYTES):
            diff_id.update(block)
            plain_size += len(block)
            compressor.stdin.write(block)
        compressor.stdin.close()
    if tar.returncode or compressor.returncode:
        raise BedError(
            f"{tree}: packing failed: tar {tar.returncode}, {compression} {compressor.returncode}"
        )
    digest = sha256_file(part)
    size = part.stat().st_size
    part.rename(blob_path(folder, digest))
    media_type = LAYER_TYPES.get(compression, f"{OCI}.layer.v1.tar")
    return Layer(digest, f"sha256:{diff_id.hexdigest()}", size, plain_size, media_type)


def build(
    name: str,
    tag: str,
    trees: Sequence[Path],
    command: Sequence[str],
    cache: Path,
    compression: str = "gzip",
) -> Image:
    """Build an image with one layer for each of ``trees``, lowest first, below ``cache``."""
    folder = cache / f"{name.replace('/', '_')}-{tag}"
    part = cache / f"{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    (part / "blobs" / "sha256").mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        layers = list(pool.map(lambda tree: pack(tree, part, compression), trees))
    config = {
        "architecture": run(["dpkg", "--print-architecture"]).strip(),
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    config_digest, config_size = add_blob(part, json.dumps(config).encode())
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": {
            "mediaType": f"{OCI}.config.v1+json",
            "digest": config_digest,
            "size": config_size,
        },
        "layers": [
            {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}
            for layer in layers
        ],
    }
    (part / "manifest.json").write_text(json.dumps(manifest))
    (part / "layers.json").write_text(json.dumps([asdict(layer) for layer in layers]))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return load(name, tag, cache)


def load(name: str, tag: str, cache: Path) -> Image:
    """An image that was built before; FileNotFoundError when there is none."""
    folder = cache / f"{name.replace('/', '_')}-{tag}"
    layers = tuple(Layer(**row) for row in json.loads((folder / "layers.json").read_text()))
    digest = sha256_file(folder / "manifest.json")
    return Image(name, tag, folder, digest, layers)
