"""Images that must be refused, each with what the refusal must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.cases.images import (
    OCI_GZIP,
    ImageCase,
    digest,
    frame,
    gzipped,
    image,
    member,
    skippable,
)
from tests.cases.odd import DATA, one, plain_of
from tests.cases.tars import file, layer


def _flipped(data: bytes, at: int, mask: int = 1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= mask
    return bytes(changed)


def _broken_gzip() -> dict[str, tuple[Callable[[bytes], bytes], str]]:
    junk = b"junk that is no member"
    return {
        "gzip cut before its trailer": (lambda plain: member(plain)[:-8], "cut"),
        "gzip cut within its trailer": (lambda plain: member(plain)[:-3], "cut"),
        "gzip cut in the middle": (lambda plain: member(plain)[:2000], "cut"),
        "gzip cut in a second header": (lambda plain: member(plain) + member(b"")[:6], "cut"),
        "gzip with a wrong CRC": (lambda plain: _flipped(member(plain), -8), "data check"),
        "gzip with a wrong length": (lambda plain: _flipped(member(plain), -4), "length check"),
        "gzip with a flipped byte": (lambda plain: _flipped(member(plain), 3000, 255), "gzip"),
        "gzip with a bad second member": (
            lambda plain: member(plain[:5000]) + _flipped(member(plain[5000:]), -8),
            "data check",
        ),
        "gzip with junk behind it": (lambda plain: member(plain) + junk, "gzip"),
    }


def _broken_zstd() -> dict[str, tuple[Callable[[bytes], bytes], str]]:
    junk = b"junk that is no frame"
    return {
        "zstd cut": (lambda plain: frame(plain)[:-100], "zstd"),
        "zstd cut in a frame header": (lambda plain: frame(plain) + frame(plain)[:5], "zstd"),
        "zstd cut in a skippable frame": (
            lambda plain: frame(plain) + skippable(b"x" * 99)[:50],
            "zstd",
        ),
        "zstd with a wrong checksum": (
            lambda plain: _flipped(frame(plain, write_checksum=True), -1),
            "zstd",
        ),
        "zstd with junk behind it": (lambda plain: frame(plain) + junk, "zstd"),
    }


def _false_documents() -> list[ImageCase]:
    """Configs and manifests that do not say what their layers are."""
    other = gzipped(layer(file(b"other", DATA)))
    good = gzipped(plain_of("false documents"))
    packed = replace(good, diff_id=digest(good.data))
    longer, shorter = replace(good, size=len(good.data) + 1), replace(good, size=len(good.data) - 1)
    secret = replace(good, label=OCI_GZIP + "+encrypted")
    return [
        image("diffID lies", [replace(good, diff_id=other.diff_id)], refused="diffID"),
        image("diffID of the packed bytes", [packed], refused="diffID"),
        image(
            "diffIDs in the wrong order",
            [good, other],
            refused="diffID",
            diff_ids=[other.diff_id, good.diff_id],
        ),
        image("more layers than diffIDs", [good, other], refused="1 diff", diff_ids=[good.diff_id]),
        image("fewer layers than diffIDs", [good], refused="2 diff", diff_ids=[good.diff_id] * 2),
        image("no diffIDs", [good], refused="0 diff", diff_ids=[]),
        image("a layer that is shorter than promised", [longer], refused=str(longer.size)),
        image("a layer that is longer than promised", [shorter], refused=str(shorter.size)),
        image("an encrypted layer", [secret], refused="encrypted"),
    ]


def refused_images() -> list[ImageCase]:
    """All that must be refused, each with a word that says why."""
    streams = {
        **_broken_gzip(),
        **_broken_zstd(),
        "no tar at all": (lambda plain: member(b"#!/bin/sh\n" * 99), "tar"),
    }
    broken = [
        replace(one(name, pack), rows={}, refused=word) for name, (pack, word) in streams.items()
    ]
    return [*broken, *_false_documents()]
