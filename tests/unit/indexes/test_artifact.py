"""The artifact's manifest: what is composed is parsed, all else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from snapshotter.errors import RefusedError
from snapshotter.indexes import artifact as form
from snapshotter.indexes.artifact import Content, compose_artifact, parse_artifact
from tests.unit.indexes.samples import IMAGE, OTHER, artifact, bent, layer, named


@pytest.mark.parametrize("envelope", [None, Content(named("envelope"), 400)])
def test_what_is_composed_is_parsed_again(envelope: Content | None) -> None:
    made = artifact(envelope)
    assert parse_artifact(compose_artifact(made), "it", image=IMAGE.digest) == made


def test_the_same_artifact_has_the_same_bytes() -> None:
    assert compose_artifact(artifact()) == compose_artifact(artifact())


def _layer(number: int, **more: Any) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["layers"][number].update(more)


def _note(number: int, key: str, value: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["layers"][number]["annotations"].update({key: value})


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another image": (
        lambda d: d["subject"].update(digest=str(OTHER)),
        f"it is the index of image {OTHER}, not of {IMAGE.digest}",
    ),
    "no image": (lambda d: d.pop("subject"), "it refers to no image"),
    "an image index as subject": (
        lambda d: d["subject"].update(mediaType="application/vnd.oci.image.index.v1+json"),
        "its subject is no image",
    ),
    "newer artifact": (
        lambda d: d.update(artifactType="application/vnd.ember.image.index.v2"),
        "newer version",
    ),
    "newer index": (_layer(0, mediaType="application/vnd.ember.layer.index.v3+zstd"), "newer"),
    "newer windows": (_layer(1, mediaType="application/vnd.ember.layer.windows.v12"), "newer"),
    "older index": (
        _layer(0, mediaType="application/vnd.ember.layer.index.v1+zstd"),
        "'application/vnd.ember.layer.index.v1+zstd' is not what an index artifact holds",
    ),
    "unknown layer": (_layer(0, mediaType="text/plain"), "'text/plain' is not what"),
    "something else": (lambda d: d.update(artifactType="application/spdx+json"), "spdx"),
    "an index of manifests": (lambda d: d.update(manifests=[]), "not an image manifest"),
    "docker's type": (
        lambda d: d.update(mediaType="application/vnd.docker.distribution.manifest.v2+json"),
        "is an OCI image manifest",
    ),
    "a config of its own": (lambda d: d["config"].update(mediaType="a/b"), "not the empty one"),
    "no platform": (lambda d: d.pop("annotations"), form.PLATFORM),
    "a bad platform": (lambda d: d["annotations"].update({form.PLATFORM: "linux"}), "platform"),
    "a platform with a line in it": (
        lambda d: d["annotations"].update({form.PLATFORM: "linux/amd64\nok"}),
        form.PLATFORM,
    ),
    "two indexes": (lambda d: d["layers"].append(d["layers"][0]), "has two indexes"),
    "two windows": (lambda d: d["layers"].append(d["layers"][1]), "has two windows files"),
    "windows alone": (lambda d: d["layers"].pop(0), "without its index"),
    "no layer named": (lambda d: d["layers"][0].pop("annotations"), form.LAYER),
    "no diffID": (_note(0, form.DIFF_ID, "sha256:12"), form.DIFF_ID),
    "no plain digest": (_note(0, form.PLAIN_DIGEST, ""), form.PLAIN_DIGEST),
    "length in words": (_note(0, form.PLAIN_LENGTH, "2k"), form.PLAIN_LENGTH),
    "negative length": (_note(0, form.PLAIN_LENGTH, "-1"), form.PLAIN_LENGTH),
    "endless": (_note(0, form.PLAIN_LENGTH, str(form.INDEX_LIMIT_BYTES + 1)), form.PLAIN_LENGTH),
    "longer packed than plain": (_layer(0, size=2 * 2048), "compressed"),
    "endless windows": (_layer(1, size=form.WINDOWS_LIMIT_BYTES + 1), "a windows file of"),
    "size in words": (_layer(0, size="7"), "'size'"),
    "digest in words": (_layer(0, digest="sha256:../x"), "not a digest"),
    "two envelopes": (
        lambda d: d["layers"].extend(2 * [_envelope(400)]),
        "more than one signature",
    ),
    "endless envelope": (
        lambda d: d["layers"].append(_envelope(form.ENVELOPE_LIMIT_BYTES + 1)),
        "its signature is longer",
    ),
    "too many layers": (lambda d: d.update(layers=d["layers"] * 1025), "more than 1024 layers"),
}


def _envelope(size: int) -> dict[str, Any]:
    return {"mediaType": form.ENVELOPE_TYPE, "digest": str(named("e")), "size": size}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_artifact_of_the_image_is_refused_with_the_reason(name: str) -> None:
    change, reason = BAD[name]
    with pytest.raises(RefusedError) as caught:
        parse_artifact(bent(change), "the artifact", image=IMAGE.digest)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("the artifact")


def test_no_cut_manifest_is_taken() -> None:
    whole = compose_artifact(artifact())
    refused = 0
    for length in range(len(whole)):
        with pytest.raises(RefusedError):
            parse_artifact(whole[:length], "it", image=IMAGE.digest)
        refused += 1
    assert refused == len(whole)


def test_fields_of_later_days_are_no_fault() -> None:
    data = bent(lambda d: d["annotations"].update({"org.example": "x"}))
    assert parse_artifact(data, "it", image=IMAGE.digest) == artifact()
    assert json.loads(data)["annotations"]["org.example"] == "x"


def test_half_a_million_empty_files_may_be_longer_than_their_layer() -> None:
    made = layer("empty files")
    plain = Content(made.plain.digest, 500_000 * 110)
    replace(made, plain=plain).check_offer(made.diff_id, 20_000_000)
    with pytest.raises(RefusedError, match="more than the layer"):
        replace(made, plain=Content(plain.digest, 200_000_000)).check_offer(made.diff_id, 20_000)


def test_an_index_of_something_else_is_no_offer() -> None:
    with pytest.raises(RefusedError, match="the image's config promises"):
        layer("a").check_offer(OTHER, 20_000)
