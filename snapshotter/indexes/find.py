"""The indexes of an image where others left them: found by referrers, and checked.

Finding reads manifests and signatures only: small, bounded in number. What they promise of an index
it is held to when it is fetched (fetched.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import CorruptError, NotFoundError, RefusedError
from snapshotter.indexes.artifact import (
    ARTIFACT_TYPE,
    IndexArtifact,
    parse_artifact,
    signers_of,
)
from snapshotter.indexes.keys import Keyring
from snapshotter.indexes.trust import check_signature
from snapshotter.oci.documents import DOCUMENT_LIMIT_BYTES, Descriptor
from snapshotter.oci.reference import Reference
from snapshotter.oci.resolver import FetchedManifest

CANDIDATE_LIMIT = 8
"""So many artifacts of an image are looked at; a builder adds none that is there already."""


class Documents(Protocol):
    """Small blobs, held to digest and length."""

    async def document(self, blob: BlobRef) -> bytes: ...


class Source(Documents, Protocol):
    """What finding needs of a registry client; manifests are held to digest and length too."""

    async def referrers(self, image: Reference, artifact_type: str) -> list[Descriptor]: ...

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest: ...


@dataclass(frozen=True, slots=True)
class Found:
    """An artifact of the image. ``digest`` is that of its manifest, ``repository`` where its blobs
    are. ``key_id`` is the trusted key that signed it; None with a ``refusal``, why none did."""

    artifact: IndexArtifact
    digest: Digest
    repository: str
    key_id: str | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, that which is signed by a trusted key first, and why others are not used."""

    found: tuple[Found, ...]
    refused: tuple[str, ...] = ()

    @property
    def reasons(self) -> str:
        """In one line, why none is used that no trusted key signed; empty if there is none."""
        return "; ".join([*(one.refusal for one in self.found if one.refusal), *self.refused])

    @property
    def signed(self) -> Found | None:
        """The best that a trusted key signed; None if there is none."""
        return next((one for one in self.found if one.key_id is not None), None)


async def find(
    source: Source, image: Reference, trusted: Keyring, *, every: bool = False
) -> Findings:
    """The index artifacts of ``image`` (pinned to its manifest's digest), checked: until one is
    signed by a trusted key, or (``every``) all of them.

    Raises what `Source.referrers` raises, and UnavailableError of an artifact that could not be
    read; an artifact that is wrong is only refused.
    """
    assert image.digest is not None
    entries = await source.referrers(image, ARTIFACT_TYPE)
    found: list[Found] = []
    refused: list[str] = []
    for entry in likely(entries, trusted):
        try:
            found.append(await load(source, image, entry.digest, trusted, entry.size_bytes))
        except (RefusedError, CorruptError, NotFoundError) as error:
            refused.append(str(error))
            continue
        if found[-1].key_id is not None and not every:
            break
    found.sort(key=lambda one: one.key_id is None)
    return Findings(tuple(found), tuple(refused))


def likely(entries: Sequence[Descriptor], trusted: Keyring) -> list[Descriptor]:
    """The entries to look at, best first: those that name a trusted key as signer, if they may be
    believed, before those that were left by earlier keys and by others."""

    def names_none(entry: Descriptor) -> bool:
        return not any(key in trusted.keys for key in signers_of(entry.annotations))

    return sorted(entries, key=names_none)[:CANDIDATE_LIMIT]


async def load(
    source: Source,
    image: Reference,
    digest: Digest,
    trusted: Keyring,
    size_bytes: int | None = None,
) -> Found:
    """The artifact with this digest, which must be one of ``image``."""
    what = f"index artifact {image.name}@{digest}"
    if size_bytes is not None and size_bytes > DOCUMENT_LIMIT_BYTES:
        raise RefusedError(f"{what}: longer than {DOCUMENT_LIMIT_BYTES} bytes")
    pinned = Reference(image.registry, image.repository, None, digest)
    fetched = await source.manifest(pinned, size_bytes)
    artifact = parse_artifact(fetched.data, what, image=image.digest)
    return await weigh(source, artifact, digest, image.name, trusted, what)


async def weigh(
    source: Documents,
    artifact: IndexArtifact,
    digest: Digest,
    repository: str,
    trusted: Keyring,
    what: str,
) -> Found:
    """Who signed an artifact that was read, if that one is trusted."""
    key_id, refusal = None, ""
    try:
        envelope = await _envelope(source, repository, artifact)
        key_id = check_signature(artifact, envelope, trusted, what)
    except (RefusedError, CorruptError, NotFoundError) as error:
        refusal = str(error)
    return Found(artifact, digest, repository, key_id, refusal)


async def _envelope(source: Documents, repository: str, artifact: IndexArtifact) -> bytes | None:
    if artifact.envelope is None:
        return None
    content = artifact.envelope
    return await source.document(BlobRef(repository, content.digest, content.size_bytes))
