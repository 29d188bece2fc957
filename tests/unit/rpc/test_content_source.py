"""containerd's content store as a source of images."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.content import BlobRef
from snapshotter.errors import CorruptError, NotFoundError
from snapshotter.oci.reference import parse_reference
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.content_source import ContentSource
from snapshotter.rpc.pb.containerd.services.content.v1 import content_pb2
from snapshotter.rpc.pb.containerd.services.images.v1 import images_pb2
from snapshotter.rpc.pb.containerd.types import descriptor_pb2
from tests.fakes.registry import sha256
from tests.fakes.upstream import Upstream, reply

READ = "/containerd.services.content.v1.Content/Read"
INFO = "/containerd.services.content.v1.Content/Info"
LIST = "/containerd.services.images.v1.Images/List"
DATA = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
NAME = "registry.example/app:1"


@pytest.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[Upstream]:
    async with Upstream(tmp_path / "containerd.sock") as made:
        yield made


@pytest.fixture
async def source(upstream: Upstream) -> AsyncIterator[ContentSource]:
    containerd = Containerd(upstream.path, 5.0, 5.0)
    target = descriptor_pb2.Descriptor(digest=str(sha256(DATA)), size=len(DATA))
    records = images_pb2.ListImagesResponse(images=[images_pb2.Image(name=NAME, target=target)])
    upstream.answers[LIST] = reply(records.SerializeToString())
    upstream.answers[READ] = reply(content_pb2.ReadContentResponse(data=DATA).SerializeToString())
    info = content_pb2.Info(digest=str(sha256(DATA)), size=len(DATA))
    upstream.answers[INFO] = reply(content_pb2.InfoResponse(info=info).SerializeToString())
    yield ContentSource(containerd, "default")
    await containerd.close()


async def test_an_image_is_found_by_its_name(source: ContentSource) -> None:
    fetched = await source.manifest(parse_reference(NAME))
    assert (fetched.data, fetched.digest) == (DATA, sha256(DATA))


async def test_an_image_that_is_not_there_is_named(source: ContentSource) -> None:
    with pytest.raises(NotFoundError, match=r"has no image registry.example/other:1 in namespace"):
        await source.manifest(parse_reference("registry.example/other:1"))


async def test_a_layer_is_streamed_if_it_has_its_length(source: ContentSource) -> None:
    whole = BlobRef("registry.example/app", sha256(DATA), len(DATA))
    assert b"".join([part async for part in source.stream(whole)]) == DATA
    assert await source.document(whole) == DATA
    with pytest.raises(CorruptError, match="bytes long, not 7"):
        await anext(source.stream(BlobRef("registry.example/app", sha256(DATA), 7)))


async def test_bytes_that_are_not_what_they_are_called_are_refused(source: ContentSource) -> None:
    with pytest.raises(CorruptError):
        await source.manifest(parse_reference("registry.example/app").with_digest(sha256(b"x")))
