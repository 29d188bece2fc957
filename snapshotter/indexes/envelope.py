"""DSSE envelopes (secure-systems-lab, dsse/envelope.md, protocol.md 1.0): payload and signatures.

An envelope is right if one known key signed exactly its payload under its type; signatures of
unknown keys are no fault, so that an artifact can be signed for an old and a new key. The key id
is only a hint where to look: it never decides.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from snapshotter.errors import RefusedError
from snapshotter.indexes.keys import SigningKey
from snapshotter.oci.documents import objects, parse_object, text_of

SIGNATURE_LIMIT = 16
_SIGNATURE_BYTES = 64
_KEY_ID = re.compile(r"[0-9a-f]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature, and the key that it says it is by."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """Signed bytes of a type."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]


def pre_authentication(payload_type: str, payload: bytes) -> bytes:
    """What is signed (DSSE v1, PAE)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload_type: str, payload: bytes, keys: Sequence[SigningKey]) -> bytes:
    """The envelope's JSON, signed by each of ``keys``."""
    message = pre_authentication(payload_type, payload)
    signatures = [
        {"keyid": key.key_id, "sig": base64.b64encode(key.sign(message)).decode()} for key in keys
    ]
    document = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": signatures,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def parse_envelope(data: bytes, what: str) -> Envelope:
    """Parse an envelope; RefusedError names the fault."""
    document = parse_object(data, what)
    entries = objects(document, "signatures", what)
    if not 0 < len(entries) <= SIGNATURE_LIMIT:
        raise RefusedError(f"{what}: {len(entries)} signatures; 1 to {SIGNATURE_LIMIT} are read")
    signatures = []
    for entry in entries:
        value = _bytes(text_of(entry, "sig", what), f"{what}: a signature")
        if len(value) != _SIGNATURE_BYTES:
            raise RefusedError(f"{what}: a signature of {len(value)} bytes is not one of ed25519")
        signatures.append(Signature(text_of(entry, "keyid", what)[:200], value))
    payload = _bytes(text_of(document, "payload", what), f"{what}: the payload")
    return Envelope(text_of(document, "payloadType", what), payload, tuple(signatures))


def signer(envelope: Envelope, keys: Mapping[str, Ed25519PublicKey], what: str) -> str:
    """The id of the first of ``keys`` that signed the envelope.

    RefusedError if none did: unknown keys, or a signature that is wrong under a known one.
    """
    message = pre_authentication(envelope.payload_type, envelope.payload)
    for signature in envelope.signatures:
        hinted = [signature.key_id] if signature.key_id in keys else []
        for key_id in hinted or ([] if signature.key_id else keys):
            try:
                keys[key_id].verify(signature.value, message)
            except InvalidSignature:
                continue
            return key_id
    known = [one.key_id for one in envelope.signatures if one.key_id in keys]
    if known:
        raise RefusedError(f"{what}: the signature by key {known[0]} is wrong: it was changed")
    names = ", ".join(_shown(one.key_id) for one in envelope.signatures)
    raise RefusedError(f"{what}: signed by no key that is trusted here, but by {names}")


def _shown(key_id: str) -> str:
    """So much of a key's id as people compare; it may be anybody's words."""
    return key_id[:16] if _KEY_ID.fullmatch(key_id) else f"{key_id[:70]!r}"


def _bytes(text: str, what: str) -> bytes:
    """Base64 as DSSE allows it: standard or URL-safe."""
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except ValueError:
        raise RefusedError(f"{what} is no base64") from None
