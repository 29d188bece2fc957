"""What a signature on an index artifact says, as bytes and back. Pure.

It binds the image's manifest digest, its platform and, of every layer, digest, diffID and the
digests and lengths of the plain index file and of the windows file. So it holds for no other
image, no other set of indexes, and whoever re-compresses an index needs no new signature.
"""

from __future__ import annotations

import json
from typing import Any

from snapshotter.errors import RefusedError
from snapshotter.indexes.artifact import Content, IndexArtifact
from snapshotter.oci.documents import parse_object

STATEMENT_TYPE = "application/vnd.ember.index.statement.v1+json"
_TYPE_STEM = "application/vnd.ember.index.statement.v"


def compose_statement(artifact: IndexArtifact) -> bytes:
    """The statement about ``artifact``: the same bytes for the same artifact."""
    document = {
        "image": str(artifact.image.digest),
        "layers": [
            {
                "diffid": str(layer.diff_id),
                "index": _content(layer.plain),
                "layer": str(layer.layer),
                "windows": None if layer.windows is None else _content(layer.windows),
            }
            for layer in sorted(artifact.layers, key=lambda layer: layer.layer)
        ],
        "platform": str(artifact.platform),
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def check_statement(payload: bytes, payload_type: str, artifact: IndexArtifact, what: str) -> None:
    """RefusedError unless ``payload``, which somebody signed, is the statement of ``artifact``.

    The message names the first thing that it says of something else. Whoever signed more words
    than are known here signed a newer version, and says so in ``payload_type``.
    """
    if payload_type != STATEMENT_TYPE:
        kind = (
            "a newer version of" if payload_type.startswith(_TYPE_STEM) else "something else than"
        )
        raise RefusedError(
            f"{what}: what was signed is {kind} this Ember's statement ({payload_type[:100]!r})"
        )
    wanted = compose_statement(artifact)
    if payload == wanted:
        return
    signed, own = parse_object(payload, f"{what}: the signed statement"), json.loads(wanted)
    for key, name in (("image", "the image"), ("platform", "platform")):
        if signed.get(key) != own[key]:
            raise RefusedError(
                f"{what}: the signature is for {name} {_shown(signed.get(key))}, "
                f"not for {own[key]}: it was taken from another artifact"
            )
    _check_layers(signed.get("layers"), own["layers"], what)
    raise RefusedError(f"{what}: the signed statement has words that this Ember does not know")


def _check_layers(signed: Any, own: list[dict[str, Any]], what: str) -> None:
    rows = signed if isinstance(signed, list) else []
    known = {row["layer"]: row for row in rows if isinstance(row, dict) and _named(row)}
    for row in own:
        if row["layer"] not in known:
            raise RefusedError(f"{what}: the signature does not cover layer {row['layer']}")
        for key, name in (("diffid", "diffID"), ("index", "index"), ("windows", "windows file")):
            if known[row["layer"]].get(key) != row[key]:
                raise RefusedError(
                    f"{what}: the signature is for another {name} of layer {row['layer']}"
                )
    if len(rows) != len(own):
        raise RefusedError(f"{what}: the signature covers {len(rows)} layers, here are {len(own)}")


def _named(row: dict[str, Any]) -> bool:
    return isinstance(row.get("layer"), str)


def _content(content: Content) -> dict[str, Any]:
    return {"digest": str(content.digest), "length": content.size_bytes}


def _shown(value: Any) -> str:
    if not isinstance(value, str):
        return "of no name"
    return value[:150] if value.isprintable() else repr(value[:150])
