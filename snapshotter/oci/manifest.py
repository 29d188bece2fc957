"""Indexes, manifests and configs as values, and the choice of this node's manifest. Pure.

A document is what its structure says; a media type that says otherwise is refused, because two
readers that disagree about one digest would run two images (CVE-2021-41190).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError, RefusedError
from snapshotter.oci.documents import (
    DOCKER_CONFIG,
    INDEX_TYPES,
    MANIFEST_TYPES,
    OCI_CONFIG,
    SCHEMA_1,
    Descriptor,
    objects,
    parse_descriptor,
    parse_object,
    text_of,
)
from snapshotter.oci.platform import Platform

LAYER_LIMIT = 1024
_LAYER_PREFIXES = (
    "application/vnd.oci.image.layer.",
    "application/vnd.docker.image.rootfs.",
    "application/vnd.docker.container.image.rootfs.",
)
_ATTESTATION = "vnd.docker.reference.type"


@dataclass(frozen=True, slots=True)
class Index:
    """A list of manifests, nested indexes included."""

    media_type: str
    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image: its config and its layers, lowest first."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The part of an image's config that unpacking needs."""

    platform: Platform
    diff_ids: tuple[Digest, ...]


def parse_manifest(data: bytes, content_type: str, what: str) -> Index | Manifest:
    """Parse what a registry served as a manifest; RefusedError says why it can't be used.

    ``content_type`` is the registry's header; it counts only where the document itself is silent.
    """
    document = parse_object(data, what)
    header = content_type.partition(";")[0].strip().lower()
    media_type = text_of(document, "mediaType", what)
    if document.get("schemaVersion") == 1 or media_type.startswith(SCHEMA_1):
        raise RefusedError(
            f"{what}: a manifest of Docker's schema 1, which has no layer digests to trust; "
            "push the image again with a current tool"
        )
    if document.get("schemaVersion") != 2:
        raise RefusedError(f"{what}: schemaVersion is not 2")
    is_index, is_manifest = "manifests" in document, "layers" in document or "config" in document
    if is_index == is_manifest:
        raise RefusedError(f"{what}: neither clearly an index nor clearly an image manifest")
    known = INDEX_TYPES if is_index else MANIFEST_TYPES
    other = MANIFEST_TYPES if is_index else INDEX_TYPES
    if not media_type and header in (*known, *other):
        media_type = header
    if media_type in other or (media_type and media_type not in known):
        raise RefusedError(f"{what}: its media type {media_type[:100]!r} is not what it holds")
    media_type = media_type or known[0]
    if is_index:
        entries = objects(document, "manifests", what)
        return Index(media_type, tuple(parse_descriptor(entry, what) for entry in entries))
    return _image_manifest(document, media_type, what)


def _image_manifest(document: dict[str, Any], media_type: str, what: str) -> Manifest:
    if not isinstance(document.get("config"), dict):
        raise RefusedError(f"{what}: an image manifest without a config")
    config = parse_descriptor(document["config"], what)
    if config.media_type not in (OCI_CONFIG, DOCKER_CONFIG):
        raise RefusedError(
            f"{what}: its config is of type {config.media_type[:100]!r}: an artifact, not an image"
        )
    layers = []
    for entry in objects(document, "layers", what):
        layer = parse_descriptor(entry, what)
        if layer.media_type.endswith("+encrypted"):
            raise RefusedError(f"{what}: layer {layer.digest} is encrypted; Ember has no key")
        if layer.media_type.startswith(_LAYER_PREFIXES):
            layers.append(layer)
    if len(layers) > LAYER_LIMIT:
        raise RefusedError(f"{what}: more than {LAYER_LIMIT} layers")
    return Manifest(media_type, config, tuple(layers))


def parse_config(data: bytes, what: str) -> ImageConfig:
    """Parse an image's config (image-spec, config.md)."""
    document = parse_object(data, what)
    rootfs = document.get("rootfs")
    if not isinstance(rootfs, dict) or text_of(rootfs, "type", what) not in ("layers", ""):
        raise RefusedError(f"{what}: no rootfs of type 'layers'")
    entries = rootfs.get("diff_ids")
    if entries is None:
        entries = []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RefusedError(f"{what}: 'diff_ids' is not a list of digests")
    try:
        diff_ids = tuple(Digest.parse(entry) for entry in entries)
    except InvalidArgumentError as error:
        raise RefusedError(f"{what}: diff_ids: {error}") from None
    words = [text_of(document, key, what) for key in ("os", "architecture", "variant")]
    return ImageConfig(Platform.of(*words), diff_ids)


def candidates(index: Index, platform: Platform) -> Sequence[Descriptor]:
    """Entries of ``index`` worth fetching for ``platform``, best first.

    An entry without a platform (a nested index, or a sloppy tool) may hold anything and comes
    last. Attestations and artifacts are never among them.
    """
    ranked = []
    for position, entry in enumerate(index.manifests):
        if _ATTESTATION in entry.annotations:
            continue
        if not may_be_image(entry):
            continue
        if entry.platform is None:
            ranked.append((1000, position, entry))
            continue
        words = entry.platform
        rank = platform.rank(Platform.of(words["os"], words["architecture"], words["variant"]))
        if rank is not None:
            ranked.append((rank, position, entry))
    return [entry for _, _, entry in sorted(ranked, key=lambda item: item[:2])]


def may_be_image(entry: Descriptor) -> bool:
    """Whether an entry may lead to an image: it is a manifest, and not said to be an artifact."""
    is_manifest = entry.media_type in (*INDEX_TYPES, *MANIFEST_TYPES)
    return is_manifest and entry.artifact_type in ("", OCI_CONFIG, DOCKER_CONFIG)


def offered(index: Index) -> str:
    """The platforms in ``index``, for a message."""
    names = {
        str(Platform.of(p["os"], p["architecture"], p["variant"]))
        for p in (entry.platform for entry in index.manifests)
        if p is not None and p["os"] != "unknown"
    }
    return ", ".join(sorted(names)[:20]) or "none named"
