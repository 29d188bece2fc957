"""A reference leads to this node's image, or to an error that says why not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from snapshotter.errors import (
    CorruptError,
    EmberError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from snapshotter.oci.documents import (
    DOCKER_CONFIG,
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
)
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.resolver import ResolvedImage
from tests.fakes.clients import registry_client
from tests.fakes.images import (
    OCI_LAYER,
    config_of,
    descriptor,
    dump,
    index_of,
    manifest_of,
    push_image,
)
from tests.fakes.registry import FakeRegistry, flip, header, is_blob, is_manifest, sha256

AMD64 = Platform("linux", "amd64")
ARM_V7 = Platform.parse("linux/arm/v7")
LAYERS = [b"layer one" * 100, b"layer two" * 200]


@asynccontextmanager
async def stage() -> AsyncIterator[tuple[FakeRegistry, RegistryClient]]:
    limits = TransportLimits(idle_s=1)
    async with FakeRegistry() as registry, registry_client(limits=limits) as client:
        yield registry, client


async def resolve(
    stage: tuple[FakeRegistry, RegistryClient], name: str = "app", platform: Platform = AMD64
) -> ResolvedImage:
    registry, client = stage
    return await client.resolve(parse_reference(f"{registry.authority}/{name}"), platform)


def entry(manifest: bytes, platform: str | None, media_type: str = OCI_MANIFEST) -> dict[str, Any]:
    if platform is None:
        return descriptor(manifest, media_type)
    words = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
    return descriptor(manifest, media_type, platform=words)


def push_index(
    registry: FakeRegistry, *entries: dict[str, Any], tag: str | None = "latest"
) -> bytes:
    index = index_of(*entries)
    registry.add_manifest("app", index, OCI_INDEX, tag)
    return index


async def test_a_tag_leads_to_manifest_config_and_layers() -> None:
    async with stage() as (registry, client):
        digest, manifest = push_image(registry, "app", LAYERS)
        image = await resolve((registry, client))
        assert image.manifest == manifest
        assert image.manifest_digest == image.target_digest == digest
        assert image.index is None
        assert [layer.digest for layer in image.layers] == [sha256(layer) for layer in LAYERS]
        assert [layer.diff_id for layer in image.layers] == [sha256(layer) for layer in LAYERS]
        assert image.platform == AMD64
        blob = image.blob(image.layers[1])
        assert b"".join([chunk async for chunk in client.stream(blob)]) == LAYERS[1]
        assert "layer one" not in repr(image)


async def test_a_digest_leads_there_without_a_tag() -> None:
    async with stage() as (registry, client):
        digest, manifest = push_image(registry, "app", LAYERS, tag=None)
        image = await resolve((registry, client), f"app@{digest}")
        assert image.manifest == manifest


async def test_an_index_is_searched_for_the_platform_alone() -> None:
    async with stage() as (registry, client):
        _, arm = push_image(registry, "app", [b"arm"], tag=None, architecture="arm64")
        digest, amd = push_image(registry, "app", LAYERS, tag=None)
        attestation = entry(b"not there", "unknown/unknown")
        attestation["annotations"] = {"vnd.docker.reference.type": "attestation-manifest"}
        index = push_index(
            registry, attestation, entry(arm, "linux/arm64/v8"), entry(amd, "linux/amd64")
        )
        image = await resolve((registry, client))
        assert (image.manifest_digest, image.index) == (digest, index)
        assert image.target_digest == sha256(index)
        assert len(registry.seen) == 3
        arm64 = await resolve((registry, client), platform=Platform.parse("linux/arm64"))
        assert arm64.manifest == arm


async def test_an_index_in_an_index_is_searched_too() -> None:
    async with stage() as (registry, client):
        digest, amd = push_image(registry, "app", LAYERS, tag=None)
        _, arm = push_image(registry, "app", [b"arm"], tag=None, architecture="arm64")
        inner = push_index(registry, entry(arm, None), entry(amd, None), tag=None)
        push_index(registry, entry(inner, None, OCI_INDEX))
        image = await resolve((registry, client))
        assert image.manifest_digest == digest


async def test_the_best_variant_of_the_architecture_is_chosen() -> None:
    async with stage() as (registry, client):
        found = {}
        for variant in ("v5", "v6", "v8"):
            found[variant] = push_image(registry, "app", [variant.encode()], tag=None)[1]
        push_index(registry, *(entry(data, f"linux/arm/{v}") for v, data in found.items()))
        image = await resolve((registry, client), platform=ARM_V7)
        assert image.manifest == found["v6"]


async def test_a_platform_that_is_not_there_is_named_with_those_that_are() -> None:
    async with stage() as (registry, client):
        _, arm = push_image(registry, "app", [b"arm"], tag=None, architecture="arm64")
        push_index(registry, entry(arm, "linux/arm64"), entry(b"x", "windows/amd64"))
        with pytest.raises(NotFoundError, match=r"linux/amd64.*linux/arm64, windows/amd64"):
            await resolve((registry, client))


async def test_docker_s_own_types_are_understood() -> None:
    async with stage() as (registry, client):
        layer = b"docker layer"
        config = config_of([layer])
        registry.add_blob("app", config)
        layer_type = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
        manifest = dump(
            {
                "schemaVersion": 2,
                "mediaType": DOCKER_MANIFEST,
                "config": descriptor(config, DOCKER_CONFIG),
                "layers": [descriptor(layer, layer_type, urls=["https://example.com"])],
            }
        )
        registry.add_manifest("app", manifest, DOCKER_MANIFEST)
        listing = dump(
            {
                "schemaVersion": 2,
                "mediaType": DOCKER_LIST,
                "manifests": [entry(manifest, "linux/amd64", DOCKER_MANIFEST)],
            }
        )
        registry.add_manifest("app", listing, DOCKER_LIST, "latest")
        image = await resolve((registry, client))
        assert image.manifest_media_type == DOCKER_MANIFEST
        assert image.layers[0].media_type == layer_type


async def test_a_manifest_without_media_type_is_taken_for_what_it_holds() -> None:
    async with stage() as (registry, client):
        config = config_of([])
        registry.add_blob("app", config)
        manifest = dump(
            {"schemaVersion": 2, "config": descriptor(config, OCI_CONFIG), "layers": []}
        )
        registry.add_manifest("app", manifest, "text/plain", "latest")
        image = await resolve((registry, client))
        assert image.layers == ()


def image_manifest(registry: FakeRegistry, /, **changes: Any) -> bytes:
    config = config_of(LAYERS)
    registry.add_blob("app", config)
    return manifest_of(config, LAYERS, **changes)


REFUSED: dict[str, Callable[[FakeRegistry], bytes]] = {
    "no JSON": lambda registry: b"<html>",
    "a list": lambda registry: b"[]",
    "a key twice": lambda registry: b'{"schemaVersion": 2, "schemaVersion": 2}',
    "deep nesting": lambda registry: b'{"a":' * 100_000,
    "schema 1": lambda registry: dump({"schemaVersion": 1, "fsLayers": []}),
    "no schema": lambda registry: dump({"manifests": []}),
    "an index and a manifest at once": lambda registry: image_manifest(registry, manifests=[]),
    "a media type that lies": lambda registry: image_manifest(registry, mediaType=OCI_INDEX),
    "neither": lambda registry: dump({"schemaVersion": 2}),
    "no config": lambda registry: dump({"schemaVersion": 2, "layers": []}),
    "an artifact": lambda registry: image_manifest(
        registry, config=descriptor(b"{}", "application/vnd.cncf.helm.config.v1+json")
    ),
    "an encrypted layer": lambda registry: image_manifest(
        registry, layers=[descriptor(b"x", OCI_LAYER + "+gzip+encrypted")]
    ),
    "more layers than diffIDs": lambda registry: image_manifest(
        registry, layers=[descriptor(b"x", OCI_LAYER)] * 3
    ),
    "a negative size": lambda registry: image_manifest(
        registry, layers=[{**descriptor(b"x", OCI_LAYER), "size": -1}]
    ),
    "a size that is none": lambda registry: image_manifest(
        registry, layers=[{**descriptor(b"x", OCI_LAYER), "size": True}]
    ),
    "a digest that is none": lambda registry: image_manifest(
        registry, layers=[{**descriptor(b"x", OCI_LAYER), "digest": "sha256:../../etc"}]
    ),
    "a weak digest": lambda registry: image_manifest(
        registry, layers=[{**descriptor(b"x", OCI_LAYER), "digest": "md5:" + "0" * 32}]
    ),
    "layers that are no list": lambda registry: image_manifest(registry, layers={"0": {}}),
    "annotations that are no strings": lambda registry: image_manifest(
        registry, layers=[descriptor(b"x", OCI_LAYER, annotations={"a": 1})]
    ),
    "an index without end": lambda registry: index_of(
        *(entry(b"%d" % number, None, OCI_INDEX) for number in range(5000))
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
async def test_what_is_no_usable_image_is_refused(kind: str) -> None:
    async with stage() as (registry, client):
        registry.add_manifest("app", REFUSED[kind](registry), OCI_MANIFEST, "latest")
        with pytest.raises(RefusedError, match="app"):
            await resolve((registry, client))


@pytest.mark.parametrize(
    "config",
    [
        b"[]",
        dump({"rootfs": {"type": "frames", "diff_ids": []}}),
        dump({"rootfs": {"type": "layers", "diff_ids": "x"}}),
        dump({"rootfs": {"type": "layers", "diff_ids": ["sha256:1", "sha256:2"]}}),
        dump({}),
    ],
)
async def test_a_config_that_can_t_be_used_is_refused(config: bytes) -> None:
    async with stage() as (registry, client):
        registry.add_blob("app", config)
        registry.add_manifest("app", manifest_of(config, LAYERS), OCI_MANIFEST, "latest")
        with pytest.raises(RefusedError, match="config"):
            await resolve((registry, client))


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (flip(5), is_manifest),
        (flip(5), is_blob),
        (header("Docker-Content-Digest", "sha256:" + "0" * 64), is_manifest),
        (header("Docker-Content-Digest", "nonsense"), is_manifest),
    ],
)
async def test_bytes_that_are_not_what_was_named_are_corrupt(fault: Any, where: Any) -> None:
    async with stage() as (registry, client):
        push_image(registry, "app", LAYERS)
        registry.inject(fault, where)
        with pytest.raises(CorruptError):
            await resolve((registry, client))


async def test_a_manifest_that_lies_about_a_size_is_corrupt() -> None:
    async with stage() as (registry, client):
        config = config_of(LAYERS)
        registry.add_blob("app", config)
        lie = {**descriptor(config, OCI_CONFIG), "size": len(config) - 1}
        manifest = json.loads(manifest_of(config, LAYERS))
        manifest["config"] = lie
        registry.add_manifest("app", dump(manifest), OCI_MANIFEST, "latest")
        with pytest.raises(CorruptError):
            await resolve((registry, client))
        _, good = push_image(registry, "app", LAYERS, tag=None)
        push_index(registry, {**entry(good, "linux/amd64"), "size": 3})
        with pytest.raises(CorruptError, match="promised 3"):
            await resolve((registry, client))


async def test_indexes_that_nest_for_ever_are_refused() -> None:
    async with stage() as (registry, client):
        inner = index_of()
        for _ in range(6):
            registry.add_manifest("app", inner, OCI_INDEX, "latest")
            inner = index_of(entry(inner, None, OCI_INDEX))
        with pytest.raises(RefusedError, match="nested deeper"):
            await resolve((registry, client))


async def test_a_manifest_too_long_is_not_read_to_its_end() -> None:
    async with stage() as (registry, client):
        registry.add_manifest("app", b" " * (9 * 1024 * 1024), OCI_MANIFEST, "latest")
        with pytest.raises(CorruptError, match="longer"):
            await resolve((registry, client))


async def test_an_image_that_is_not_there_is_not_found() -> None:
    async with stage() as (registry, client):
        with pytest.raises(NotFoundError):
            await resolve((registry, client))
        await registry.stop()
        error: type[EmberError] = UnavailableError
        with pytest.raises(error):
            await resolve((registry, client))
