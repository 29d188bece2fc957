"""Who signed an artifact, and signing one: statement and envelope together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotter.errors import RefusedError
from snapshotter.indexes.artifact import IndexArtifact
from snapshotter.indexes.envelope import parse_envelope, seal, signer
from snapshotter.indexes.keys import Keyring, SigningKey
from snapshotter.indexes.statement import STATEMENT_TYPE, check_statement, compose_statement


def sign(artifact: IndexArtifact, keys: Sequence[SigningKey]) -> bytes:
    """The envelope to put beside the artifact's indexes."""
    return seal(STATEMENT_TYPE, compose_statement(artifact), keys)


def check_signature(
    artifact: IndexArtifact, envelope: bytes | None, trusted: Keyring, what: str
) -> str:
    """The id of a trusted key that signed ``artifact``; RefusedError says why there is none.

    ``artifact`` was parsed for the image in question; ``envelope`` is its signature's blob.
    """
    if envelope is None:
        raise RefusedError(f"{what}: it is not signed")
    parsed = parse_envelope(envelope, f"{what}: its signature")
    found = signer(parsed, trusted.keys, what)
    check_statement(parsed.payload, parsed.payload_type, artifact, what)
    return found
