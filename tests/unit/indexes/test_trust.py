"""Signatures: who signed what is found; a replay, a swap and an unknown key are refused."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshotter.errors import RefusedError
from snapshotter.indexes.artifact import Content, IndexArtifact
from snapshotter.indexes.envelope import parse_envelope, pre_authentication, seal
from snapshotter.indexes.keys import Keyring, SigningKey, key_id
from snapshotter.indexes.statement import STATEMENT_TYPE, compose_statement
from snapshotter.indexes.trust import check_signature, sign
from snapshotter.oci.documents import OCI_MANIFEST, Descriptor
from snapshotter.oci.platform import Platform
from tests.unit.indexes.samples import OTHER, artifact, layer, named


def _key() -> SigningKey:
    key = Ed25519PrivateKey.generate()
    return SigningKey(key_id(key.public_key()), key)


OURS, THEIRS = _key(), _key()
RING = Keyring({OURS.key_id: OURS.key.public_key()})


def test_the_signer_is_named() -> None:
    assert check_signature(artifact(), sign(artifact(), [OURS]), RING, "it") == OURS.key_id


def test_one_known_key_of_several_is_enough() -> None:
    envelope = sign(artifact(), [THEIRS, OURS])
    assert check_signature(artifact(), envelope, RING, "it") == OURS.key_id


def test_pre_authentication_is_that_of_the_specification() -> None:
    # The example of dsse/protocol.md.
    encoded = pre_authentication("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def _swapped(**more: Any) -> IndexArtifact:
    made = artifact()
    return replace(made, layers=(replace(made.layers[0], **more), made.layers[1]))


SWAPS: dict[str, tuple[IndexArtifact, str]] = {
    "another image": (
        replace(artifact(), image=Descriptor(OCI_MANIFEST, OTHER, 9)),
        "it was taken from another artifact",
    ),
    "another platform": (
        replace(artifact(), platform=Platform.of("linux", "amd64")),
        "the signature is for platform linux/arm64, not for linux/amd64",
    ),
    "another index": (
        _swapped(plain=Content(named("evil"), 2048)),
        f"for another index of layer {layer('a').layer}",
    ),
    "another length": (_swapped(plain=Content(layer("a").plain.digest, 99)), "another index"),
    "other windows": (_swapped(windows=Content(named("evil"), 5000)), "another windows file"),
    "no windows": (_swapped(windows=None), "another windows file"),
    "another diffID": (_swapped(diff_id=named("evil")), "another diffID"),
    "another layer": (_swapped(layer=named("evil")), "does not cover layer"),
    "a layer more": (
        replace(artifact(), layers=(*artifact().layers, layer("c"))),
        "does not cover layer",
    ),
    "a layer less": (replace(artifact(), layers=(layer("a"),)), "covers 2 layers, here are 1"),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_signature_holds_for_nothing_else(name: str) -> None:
    other, reason = SWAPS[name]
    with pytest.raises(RefusedError, match="it: ") as caught:
        check_signature(other, sign(artifact(), [OURS]), RING, "it")
    assert reason in str(caught.value)


def test_packing_again_needs_no_new_signature() -> None:
    repacked = _swapped(packed=Content(named("packed anew"), 600))
    assert check_signature(repacked, sign(artifact(), [OURS]), RING, "it") == OURS.key_id


def test_an_unknown_key_is_refused_and_named() -> None:
    with pytest.raises(
        RefusedError, match=f"no key that is trusted here, but by {THEIRS.key_id[:16]}$"
    ):
        check_signature(artifact(), sign(artifact(), [THEIRS]), RING, "it")


def test_a_key_s_name_cannot_write_lines_into_a_log() -> None:
    document = json.loads(sign(artifact(), [THEIRS]))
    document["signatures"][0]["keyid"] = "x\nCRITICAL all is well"
    with pytest.raises(RefusedError) as caught:
        check_signature(artifact(), json.dumps(document).encode(), RING, "it")
    assert "\n" not in str(caught.value)


def test_no_signature_is_refused() -> None:
    with pytest.raises(RefusedError, match="not signed"):
        check_signature(artifact(), None, RING, "it")


def test_a_key_id_alone_proves_nothing() -> None:
    document = json.loads(sign(artifact(), [THEIRS]))
    document["signatures"][0]["keyid"] = OURS.key_id
    with pytest.raises(RefusedError, match=f"by key {OURS.key_id} is wrong"):
        check_signature(artifact(), json.dumps(document).encode(), RING, "it")


def test_a_signature_without_key_id_is_tried_with_all_keys() -> None:
    document = json.loads(sign(artifact(), [OURS]))
    del document["signatures"][0]["keyid"]
    assert check_signature(artifact(), json.dumps(document).encode(), RING, "it") == OURS.key_id


def test_a_changed_payload_is_refused() -> None:
    document = json.loads(sign(artifact(), [OURS]))
    other = replace(artifact(), platform=Platform.of("linux", "amd64"))
    document["payload"] = base64.b64encode(compose_statement(other)).decode()
    with pytest.raises(RefusedError, match="is wrong"):
        check_signature(other, json.dumps(document).encode(), RING, "it")


@pytest.mark.parametrize(
    ("payload_type", "reason"),
    [
        ("application/vnd.ember.index.statement.v2+json", "a newer version of"),
        ("application/vnd.in-toto+json", "something else than"),
    ],
)
def test_another_kind_of_statement_is_refused(payload_type: str, reason: str) -> None:
    envelope = seal(payload_type, compose_statement(artifact()), [OURS])
    with pytest.raises(RefusedError, match=reason):
        check_signature(artifact(), envelope, RING, "it")


@pytest.mark.parametrize("payload", [b"[]", b"{}", b"{", b'{"image":3,"layers":{}}'])
def test_signed_nonsense_is_refused(payload: bytes) -> None:
    envelope = seal(STATEMENT_TYPE, payload, [OURS])
    with pytest.raises(RefusedError, match="it"):
        check_signature(artifact(), envelope, RING, "it")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"signatures": []}, "0 signatures"),
        ({"signatures": [{"sig": "AAAA"}]}, "3 bytes is not one of ed25519"),
        ({"signatures": [{"sig": "!"}]}, "no base64"),
        ({"signatures": [{"sig": "AAAA"}] * 17}, "17 signatures"),
        ({"signatures": 7}, "not a list"),
        ({"payload": "!"}, "the payload is no base64"),
        ({"payload": 3}, "not a string"),
    ],
)
def test_a_malformed_envelope_is_refused(change: dict[str, object], reason: str) -> None:
    document = {**json.loads(sign(artifact(), [OURS])), **change}
    with pytest.raises(RefusedError, match=reason):
        parse_envelope(json.dumps(document).encode(), "it")
