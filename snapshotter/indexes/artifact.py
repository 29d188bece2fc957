"""The OCI artifact that carries an image's indexes: bytes of its manifest ↔ values. Pure.

One manifest for one image manifest (its subject). It holds for each distinct layer the index file,
compressed, and the windows file as it is, and perhaps one signature over all of that. What is
parsed here is bounded and consistent; what it promises is as good as whoever signed it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError, RefusedError
from snapshotter.image.adoption import INDEX_BYTES
from snapshotter.oci.documents import (
    MANIFEST_TYPES,
    OCI_MANIFEST,
    Descriptor,
    digest_of,
    objects,
    parse_descriptor,
    parse_object,
    text_of,
)
from snapshotter.oci.manifest import LAYER_LIMIT
from snapshotter.oci.platform import Platform

ARTIFACT_TYPE = "application/vnd.ember.image.index.v1"
INDEX_TYPE = "application/vnd.ember.layer.index.v2+zstd"
WINDOWS_TYPE = "application/vnd.ember.layer.windows.v2"
ENVELOPE_TYPE = "application/vnd.dsse.envelope.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"

PLATFORM = "dev.ember.platform"
SIGNERS = "dev.ember.signers"
LAYER = "dev.ember.layer.digest"
DIFF_ID = "dev.ember.layer.diffid"
PLAIN_DIGEST = "dev.ember.index.digest"
PLAIN_LENGTH = "dev.ember.index.length"

INDEX_LIMIT_BYTES = INDEX_BYTES
"""Longest index file, unpacked: no longer one is adopted."""
WINDOWS_LIMIT_BYTES = 16 * 1024**3
SMALL_BYTES = 64 * 1024**2
"""What any part of an index may be: that of half a million empty files is longer than its layer. A
bigger one may be no bigger than the layer."""
ENVELOPE_LIMIT_BYTES = 1024**2

_PLATFORM = re.compile(r"[A-Za-z0-9._/-]{1,100}", re.ASCII)
_SIGNERS_CHARACTERS = 4096

_VERSIONED = re.compile(r"(application/vnd\.ember\.(?:image|layer)\.(?:index|windows)\.v)(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Content:
    """Digest and length in bytes of something that is not stored under this digest."""

    digest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IndexedLayer:
    """The index of one layer: ``packed`` is the blob in the registry, ``plain`` the file in it;
    ``windows`` is the windows file, None for a layer whose checkpoints need none."""

    layer: Digest
    diff_id: Digest
    packed: Content
    plain: Content
    windows: Content | None

    def check_offer(self, diff_id: Digest, stored_bytes: int) -> None:
        """RefusedError unless the layer, of ``stored_bytes``, unpacks to ``diff_id`` by this too,
        and what would have to be fetched of it is no more than that of an index can be."""
        what = f"the index of layer {self.layer}"
        if self.diff_id != diff_id:
            raise RefusedError(
                f"{what} is for one that unpacks to {self.diff_id}; the image's config promises"
                f" {diff_id}"
            )
        for content in (self.packed, self.plain, self.windows):
            if content is not None and content.size_bytes > max(SMALL_BYTES, stored_bytes):
                raise RefusedError(
                    f"{what} is to have {content.size_bytes} bytes, more than the layer"
                )


@dataclass(frozen=True, slots=True)
class IndexArtifact:
    """The indexes of ``image`` (an image manifest), and whoever signed them.

    ``signers`` are the key ids that its annotation names: a hint which of many artifacts to look
    at first, and no proof of anything.
    """

    image: Descriptor
    platform: Platform
    layers: tuple[IndexedLayer, ...]
    envelope: Content | None = None
    signers: tuple[str, ...] = ()

    @property
    def annotations(self) -> dict[str, str]:
        """Those of the manifest, which registries repeat where they list it."""
        found = {PLATFORM: str(self.platform)}
        return {**found, SIGNERS: ",".join(self.signers)} if self.signers else found

    def layer(self, digest: Digest) -> IndexedLayer | None:
        """The index of the layer with this digest; None if it is not in here."""
        return next((found for found in self.layers if found.layer == digest), None)


def compose_artifact(artifact: IndexArtifact) -> bytes:
    """The manifest's bytes: the same for the same artifact."""
    layers: list[dict[str, Any]] = []
    for layer in artifact.layers:
        names = {LAYER: str(layer.layer), DIFF_ID: str(layer.diff_id)}
        more = {PLAIN_DIGEST: str(layer.plain.digest), PLAIN_LENGTH: str(layer.plain.size_bytes)}
        layers.append(_descriptor(INDEX_TYPE, layer.packed, {**names, **more}))
        if layer.windows is not None:
            layers.append(_descriptor(WINDOWS_TYPE, layer.windows, names))
    if artifact.envelope is not None:
        layers.append(_descriptor(ENVELOPE_TYPE, artifact.envelope))
    image = artifact.image
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": ARTIFACT_TYPE,
        "config": _descriptor(EMPTY_TYPE, Content(digest_of(EMPTY), len(EMPTY))),
        "layers": layers,
        "subject": _descriptor(image.media_type, Content(image.digest, image.size_bytes)),
        "annotations": artifact.annotations,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _descriptor(
    media_type: str, content: Content, annotations: dict[str, str] | None = None
) -> dict[str, Any]:
    found = {
        "mediaType": media_type,
        "digest": str(content.digest),
        "size": content.size_bytes,
    }
    return {**found, "annotations": annotations} if annotations else found


def parse_artifact(data: bytes, what: str, *, image: Digest | None = None) -> IndexArtifact:
    """Parse a manifest that should be the artifact of ``image``; RefusedError names the fault.

    ``what`` names the manifest in messages. Without ``image`` that of any image is taken.
    """
    document = parse_object(data, what)
    _check_kind(document, what)
    subject = document.get("subject")
    if not isinstance(subject, dict):
        raise RefusedError(f"{what}: it refers to no image (no 'subject')")
    described = parse_descriptor(subject, f"{what}: subject")
    if image is not None and described.digest != image:
        raise RefusedError(f"{what}: it is the index of image {described.digest}, not of {image}")
    if described.media_type not in MANIFEST_TYPES:
        raise RefusedError(f"{what}: its subject is no image but {described.media_type[:100]!r}")
    subject_only = Descriptor(described.media_type, described.digest, described.size_bytes)
    entries = [parse_descriptor(entry, what) for entry in objects(document, "layers", what)]
    if len(entries) > 2 * LAYER_LIMIT + 1:
        raise RefusedError(f"{what}: indexes of more than {LAYER_LIMIT} layers")
    envelopes = [entry for entry in entries if entry.media_type == ENVELOPE_TYPE]
    if len(envelopes) > 1:
        raise RefusedError(f"{what}: more than one signature envelope")
    for entry in envelopes:
        if entry.size_bytes > ENVELOPE_LIMIT_BYTES:
            raise RefusedError(f"{what}: its signature is longer than {ENVELOPE_LIMIT_BYTES} bytes")
    return IndexArtifact(
        image=subject_only,
        platform=_platform(document, what),
        layers=tuple(_layers([e for e in entries if e not in envelopes], what)),
        envelope=_content(envelopes[0]) if envelopes else None,
        signers=signers_of(document.get("annotations")),
    )


def signers_of(annotations: Any) -> tuple[str, ...]:
    """The key ids that annotations name as signers, in a manifest or where it is listed."""
    told = annotations.get(SIGNERS) if isinstance(annotations, dict) else None
    return tuple(told[:_SIGNERS_CHARACTERS].split(",")) if isinstance(told, str) and told else ()


def check_type(media_type: str, known: str, what: str) -> None:
    """RefusedError unless ``media_type`` is ``known``; a newer version is called one."""
    if media_type == known:
        return
    ours, theirs = _VERSIONED.match(known), _VERSIONED.match(media_type)
    if ours and theirs and ours[1] == theirs[1] and int(theirs[2]) > int(ours[2]):
        raise RefusedError(
            f"{what}: {media_type[:100]!r} is of a newer version than this Ember reads "
            f"({known}): update Ember, or build the index with this version"
        )
    raise RefusedError(f"{what}: {media_type[:100]!r} is not what an index artifact holds")


def _check_kind(document: dict[str, Any], what: str) -> None:
    if document.get("schemaVersion") != 2 or "manifests" in document:
        raise RefusedError(f"{what}: not an image manifest of schemaVersion 2")
    if text_of(document, "mediaType", what) not in ("", OCI_MANIFEST):
        raise RefusedError(f"{what}: an artifact is an OCI image manifest, this one is not")
    check_type(text_of(document, "artifactType", what), ARTIFACT_TYPE, f"{what}: artifactType")
    config = document.get("config")
    if not isinstance(config, dict):
        raise RefusedError(f"{what}: no config, not even the empty one")
    found = parse_descriptor(config, f"{what}: config")
    if found.media_type != EMPTY_TYPE or found.digest != digest_of(EMPTY):
        raise RefusedError(f"{what}: its config is not the empty one")


def _platform(document: dict[str, Any], what: str) -> Platform:
    annotations = document.get("annotations")
    told = annotations.get(PLATFORM) if isinstance(annotations, dict) else None
    try:
        if isinstance(told, str) and _PLATFORM.fullmatch(told):
            return Platform.parse(told)
    except InvalidArgumentError as error:
        raise RefusedError(f"{what}: {error}") from None
    raise RefusedError(f"{what}: no annotation {PLATFORM!r} that names a platform")


def _layers(entries: list[Descriptor], what: str) -> Iterator[IndexedLayer]:
    windows: dict[tuple[Digest, Digest], Content] = {}
    indexes: dict[Digest, Descriptor] = {}
    for entry in entries:
        where = f"{what}: entry {entry.digest}"
        key = _annotated(entry, LAYER, where), _annotated(entry, DIFF_ID, where)
        if entry.media_type == WINDOWS_TYPE:
            if key in windows:
                raise RefusedError(f"{what}: layer {key[0]} has two windows files")
            if not 0 < entry.size_bytes <= WINDOWS_LIMIT_BYTES:
                raise RefusedError(f"{where}: a windows file of {entry.size_bytes} bytes")
            windows[key] = _content(entry)
            continue
        family = WINDOWS_TYPE if ".windows." in entry.media_type else INDEX_TYPE
        check_type(entry.media_type, family, where)
        if key[0] in indexes:
            raise RefusedError(f"{what}: layer {key[0]} has two indexes")
        indexes[key[0]] = entry
    for digest, entry in indexes.items():
        where = f"{what}: the index of layer {digest}"
        diff_id = _annotated(entry, DIFF_ID, where)
        own = windows.pop((digest, diff_id), None)
        yield IndexedLayer(digest, diff_id, _content(entry), _plain(entry, where), own)
    for digest, _ in windows:
        raise RefusedError(f"{what}: windows of layer {digest} without its index")


def _plain(entry: Descriptor, where: str) -> Content:
    text = entry.annotations.get(PLAIN_LENGTH, "")
    length = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not 0 < length <= INDEX_LIMIT_BYTES:
        raise RefusedError(f"{where}: {PLAIN_LENGTH!r} is no length that an index can have")
    if not 0 < entry.size_bytes <= length + length // 128 + 1024:
        raise RefusedError(
            f"{where}: {entry.size_bytes} bytes cannot be {length} bytes, compressed"
        )
    return Content(_annotated(entry, PLAIN_DIGEST, where), length)


def _annotated(entry: Descriptor, key: str, where: str) -> Digest:
    try:
        return Digest.parse(entry.annotations.get(key, ""))
    except InvalidArgumentError as error:
        raise RefusedError(f"{where} ({entry.media_type[:100]!r}): {key!r}: {error}") from None


def _content(entry: Descriptor) -> Content:
    return Content(entry.digest, entry.size_bytes)
