"""Bytes from a registry → checked values: digests and sizes held to, JSON shapes held to.

The one door through which manifests, indexes and configs enter; everything behind it may trust
types and ranges. Pure. Formats: OCI image-spec 1.1 and Docker's image manifest version 2.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from snapshotter.content import Digest
from snapshotter.errors import CorruptError, InvalidArgumentError, RefusedError

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"

INDEX_TYPES = (OCI_INDEX, DOCKER_LIST)
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST)
ACCEPT = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES, "*/*;q=0.1"))

DOCUMENT_LIMIT_BYTES = 8 * 1024 * 1024
"""Longest manifest, index or config that is read; containerd's own limit is the same."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

_SIZE_LIMIT = 2**63 - 1
_ENTRY_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of a blob: its type, digest and length in bytes."""

    media_type: str
    digest: Digest
    size_bytes: int
    annotations: dict[str, str] = field(default_factory=dict)
    platform: dict[str, str] | None = None
    artifact_type: str = ""

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_TYPES

    @property
    def listed(self) -> dict[str, Any]:
        """The entry of an artifact in an index's ``manifests``."""
        return {
            "mediaType": self.media_type,
            "digest": str(self.digest),
            "size": self.size_bytes,
            "artifactType": self.artifact_type,
            "annotations": self.annotations,
        }


def digest_of(data: bytes, algorithm: str = "sha256") -> Digest:
    """The digest of ``data``."""
    return Digest(algorithm, hashlib.new(algorithm, data).hexdigest())


def check_content(data: bytes, digest: Digest, what: str, size_bytes: int | None = None) -> None:
    """CorruptError unless ``data`` has the promised length and digest."""
    if size_bytes is not None and len(data) != size_bytes:
        raise CorruptError(f"{what}: {len(data)} bytes came, its descriptor promised {size_bytes}")
    actual = digest_of(data, digest.algorithm)
    if actual != digest:
        raise CorruptError(f"{what}: the bytes that came have the digest {actual}")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object, or RefusedError. Twice the same key, NaN, deep nesting and what is no Unicode
    (RFC 8259, 8: half a surrogate pair cannot be written, logged or hashed) are refused."""
    if len(data) > DOCUMENT_LIMIT_BYTES:
        raise RefusedError(f"{what}: longer than {DOCUMENT_LIMIT_BYTES} bytes")
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{what}: not the JSON it should be ({str(error)[:200]})") from None
    if not isinstance(value, dict):
        raise RefusedError(f"{what}: a JSON object was expected")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def objects(document: dict[str, Any], key: str, what: str) -> list[dict[str, Any]]:
    """The list of objects under ``key``; absent or null counts as empty."""
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"{what}: {key!r} is not a list of objects")
    if len(value) > _ENTRY_LIMIT:
        raise RefusedError(f"{what}: {key!r} has more than {_ENTRY_LIMIT} entries")
    return value


def text_of(document: dict[str, Any], key: str, what: str) -> str:
    """The string under ``key``; absent or null counts as empty."""
    value = document.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RefusedError(f"{what}: {key!r} is not a string")
    return value


def parse_descriptor(document: dict[str, Any], what: str) -> Descriptor:
    """A descriptor object; RefusedError names the field that is wrong."""
    try:
        digest = Digest.parse(text_of(document, "digest", what))
    except InvalidArgumentError as error:
        raise RefusedError(f"{what}: {error}") from None
    size = document.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _SIZE_LIMIT:
        raise RefusedError(f"{what}: 'size' of {digest} is not a length in bytes")
    return Descriptor(
        media_type=text_of(document, "mediaType", what),
        digest=digest,
        size_bytes=size,
        annotations=_texts(document.get("annotations"), f"{what}: annotations of {digest}"),
        platform=_platform(document.get("platform"), what),
        artifact_type=text_of(document, "artifactType", what),
    )


def _texts(value: Any, what: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RefusedError(f"{what}: not a map of strings")
    return value


def _platform(value: Any, what: str) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RefusedError(f"{what}: 'platform' is not an object")
    return {key: text_of(value, key, what) for key in ("os", "architecture", "variant")}
