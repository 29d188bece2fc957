"""Whole images, made by hand down to the last byte, so that odd and false ones can be made.

Layers are blobs with a label (media type) that may be at odds with the content; configs and
manifests say what they are told to say. Nothing here checks or repairs anything.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard

from bench.bed.registry import HOST, Pusher, Registry
from snapshotter.oci.platform import host_platform
from tests.cases.rows import LayerCase
from tests.treecheck import Rows

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
OCI_GZIP = f"{OCI}.layer.v1.tar+gzip"
OCI_ZSTD = f"{OCI}.layer.v1.tar+zstd"
OCI_PLAIN = f"{OCI}.layer.v1.tar"
DOCKER_GZIP = f"{DOCKER}.image.rootfs.diff.tar.gzip"
ATTESTATION = {"vnd.docker.reference.type": "attestation-manifest"}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Blob:
    """A layer: what is stored, what it is said to unpack to, and how it is labelled."""

    data: bytes
    diff_id: str
    label: str = OCI_GZIP
    size: int | None = None


def gzipped(plain: bytes, label: str = OCI_GZIP) -> Blob:
    return Blob(gzip.compress(plain, 6, mtime=0), digest(plain), label)


def zstandarded(plain: bytes, label: str = OCI_ZSTD) -> Blob:
    return Blob(zstandard.compress(plain, 3), digest(plain), label)


def as_it_is(plain: bytes, label: str = OCI_PLAIN) -> Blob:
    return Blob(plain, digest(plain), label)


PACKERS: tuple[Callable[[bytes], Blob], ...] = (gzipped, zstandarded, as_it_is)


def member(plain: bytes, *, level: int = 6, header: bytes = b"") -> bytes:
    """One gzip member (RFC 1952); ``header`` replaces the plain one."""
    deflate = zlib.compressobj(level, zlib.DEFLATED, -15)
    body = deflate.compress(plain) + deflate.flush()
    trailer = zlib.crc32(plain).to_bytes(4, "little") + (len(plain) % 2**32).to_bytes(4, "little")
    return (header or b"\x1f\x8b\x08\0\0\0\0\0\0\xff") + body + trailer


def skippable(data: bytes, kind: int = 0) -> bytes:
    """A skippable zstd frame (RFC 8878, 3.1.2)."""
    return (0x184D2A50 + kind).to_bytes(4, "little") + len(data).to_bytes(4, "little") + data


def frame(plain: bytes, **options: Any) -> bytes:
    """One zstd frame; ``options`` as of ZstdCompressor (write_checksum, write_content_size)."""
    return zstandard.ZstdCompressor(level=3, **options).compress(plain)


@dataclass(frozen=True, slots=True)
class ImageCase:
    """An image and what must be seen of it: ``rows``, or a ``refused`` with this word in it.

    ``documents`` are manifests and indexes, inner ones first; the last one gets the tag.
    """

    name: str
    contents: tuple[bytes, ...]
    documents: tuple[bytes, ...]
    chain_id: str
    rows: Rows
    refused: str = ""
    stored: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"odd/{words}-{digest(self.name.encode())[7:11]}"

    @property
    def reference(self) -> str:
        return f"{HOST}/{self.repository}:1"

    def push(self, registry: Registry) -> None:
        """Byte for byte, whatever it is."""
        pusher = Pusher(registry, self.repository)
        for content in self.contents:
            pusher.content(digest(content), content)
        for document in self.documents[:-1]:
            pusher.manifest(digest(document), document)
        pusher.manifest("1", self.documents[-1])


def chain_of(diff_ids: Sequence[str]) -> str:
    """The chain ID (image-spec, config.md); "" of nothing."""
    chain = diff_ids[0] if diff_ids else ""
    for diff_id in diff_ids[1:]:
        chain = digest(f"{chain} {diff_id}".encode())
    return chain


def config_of(diff_ids: Sequence[str], **more: Any) -> bytes:
    """A config for this machine, without history."""
    here = host_platform()
    return json.dumps(
        {
            "os": "linux",
            "architecture": here.architecture,
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
            **more,
        }
    ).encode()


def manifest_of(config: bytes, blobs: Sequence[Blob], *, docker: bool = False) -> bytes:
    """A manifest of OCI's or Docker's kind."""
    kind = f"{DOCKER}.distribution.manifest.v2+json" if docker else f"{OCI}.manifest.v1+json"
    config_kind = f"{DOCKER}.container.image.v1+json" if docker else f"{OCI}.config.v1+json"
    document = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"mediaType": config_kind, "digest": digest(config), "size": len(config)},
        "layers": [
            {
                "mediaType": blob.label,
                "digest": digest(blob.data),
                "size": len(blob.data) if blob.size is None else blob.size,
            }
            for blob in blobs
        ],
    }
    return json.dumps(document).encode()


def entry_of(document: bytes, platform: str = "", **more: Any) -> dict[str, Any]:
    """An index's entry for ``document``; ``platform`` as os/architecture[/variant]."""
    entry = {
        "mediaType": json.loads(document)["mediaType"],
        "digest": digest(document),
        "size": len(document),
        **more,
    }
    if platform:
        words = ("os", "architecture", "variant")
        entry["platform"] = dict(zip(words, platform.split("/"), strict=False))
    return entry


def index_of(*entries: dict[str, Any], docker: bool = False) -> bytes:
    kind = f"{DOCKER}.distribution.manifest.list.v2+json" if docker else f"{OCI}.index.v1+json"
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()


def image(
    name: str,
    blobs: Sequence[Blob],
    rows: Rows | None = None,
    *,
    refused: str = "",
    diff_ids: Sequence[str] | None = None,
    docker: bool = False,
    **config: Any,
) -> ImageCase:
    """An image of ``blobs``, lowest first; ``diff_ids`` what its config says instead of theirs."""
    said = [blob.diff_id for blob in blobs] if diff_ids is None else list(diff_ids)
    settings = config_of(said, **config)
    manifest = manifest_of(settings, blobs, docker=docker)
    data = tuple(dict.fromkeys((*(blob.data for blob in blobs), settings)))
    stored = tuple(digest(blob.data) for blob in blobs)
    return ImageCase(name, data, (manifest,), chain_of(said), rows or {}, refused, stored)


def of_layers(case: LayerCase, number: int = 0) -> ImageCase:
    """Handmade tars as an image, packed in turn as gzip, zstd and not at all."""
    blobs = [PACKERS[(number + n) % 3](plain) for n, plain in enumerate(case.layers)]
    return image(case.name, blobs, case.rows)
