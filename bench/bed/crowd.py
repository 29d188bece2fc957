"""Many small images, each of many layers that no other has: a node as it is after months.

They are made and pushed in seconds. An image that was seen and whose bytes were forgotten has all
its layers mounted lazily once a container is prepared on it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from bench.bed.containerd import Containerd
from bench.bed.ember import Ember
from bench.bed.process import run
from bench.bed.registry import HOST, Pusher, Registry
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc
from snapshotter.rpc.pb.ember.control.v1 import control_pb2, control_pb2_grpc

OCI = "application/vnd.oci.image"
AT_ONCE = 4
CALL_S = 120.0


@dataclass(frozen=True)
class Member:
    """One image of the crowd; its layers hold a file each, ``f0`` in the lowest."""

    name: str
    chain_id: str
    contents: tuple[bytes, ...]
    manifest: bytes

    @property
    def reference(self) -> str:
        return f"{HOST}/{self.name}:1"

    def push(self, registry: Registry) -> None:
        pusher = Pusher(registry, self.name)
        for content in self.contents:
            pusher.content(digest(content), content)
        pusher.manifest("1", self.manifest)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def noise(number: int, layer: int, length: int) -> bytes:
    """The content of the file in a layer."""
    return random.Random(f"{number}/{layer}").randbytes(length)


def crowd(count: int, layers: int = 10, bytes_each: int = 100_000) -> list[Member]:
    """``count`` images of ``layers`` layers with ``bytes_each`` that can't be compressed."""
    architecture = run(["dpkg", "--print-architecture"]).strip()
    return [_member(number, layers, bytes_each, architecture) for number in range(count)]


def _member(number: int, layers: int, bytes_each: int, architecture: str) -> Member:
    plain = [_tar(f"f{n}", noise(number, n, bytes_each)) for n in range(layers)]
    blobs = [gzip.compress(tar, 1, mtime=0) for tar in plain]
    diff_ids = [digest(tar) for tar in plain]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    config = json.dumps({"os": "linux", "architecture": architecture, "rootfs": rootfs}).encode()
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": _descriptor(config, f"{OCI}.config.v1+json"),
        "layers": [_descriptor(blob, f"{OCI}.layer.v1.tar+gzip") for blob in blobs],
    }
    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = digest(f"{chain} {diff_id}".encode())
    return Member(f"crowd/{number}", chain, (*blobs, config), json.dumps(manifest).encode())


def _tar(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def _descriptor(content: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(content), "size": len(content)}


def pull(ember: Ember, members: Sequence[Member]) -> int:
    """Have the daemon pull all of them; how many of their layers are lazy."""
    with grpc.insecure_channel(f"unix:{ember.socket}") as channel, ThreadPoolExecutor(AT_ONCE) as p:
        stub = control_pb2_grpc.ControlStub(channel)

        def one(member: Member) -> int:
            request = control_pb2.PullRequest(image=member.reference, namespace=ember.namespace)
            return sum(step.state == "lazy" for step in stub.Pull(request, timeout=CALL_S))

        return sum(p.map(one, members))


def forget_bytes(ember: Ember, members: Sequence[Member]) -> None:
    """Remove their bytes and keep their indexes: what is pulled next is lazy and not here."""
    with grpc.insecure_channel(f"unix:{ember.socket}") as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        for member in members:
            request = control_pb2.RemoveRequest(
                image=member.reference, data_only=True, namespace=ember.namespace
            )
            stub.Remove(request, timeout=CALL_S)


@contextmanager
def stood_on(containerd: Containerd, members: Sequence[Member]) -> Iterator[None]:
    """A view of each, as a container has one: all their layers are mounted as long as it lasts."""
    meta = (("containerd-namespace", containerd.namespace),)
    kept = {"containerd.io/gc.root": "bench"}
    with grpc.insecure_channel(f"unix:{containerd.address}") as channel, ExitStack() as stack:
        stub = snapshots_pb2_grpc.SnapshotsStub(channel)
        for number, member in enumerate(members):
            common = {"snapshotter": "ember", "key": f"crowd-{number}"}
            make = pb.ViewSnapshotRequest(**common, parent=member.chain_id, labels=kept)
            stub.View(make, metadata=meta, timeout=CALL_S)
            gone = pb.RemoveSnapshotRequest(**common)
            stack.callback(stub.Remove, gone, metadata=meta, timeout=CALL_S)
            stub.Mounts(pb.MountsRequest(**common), metadata=meta, timeout=CALL_S)
        yield
