"""containerd that stops to talk: each call and each message has its time, and an error of ours."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.content import Digest
from snapshotter.errors import DeadlineError, EmberError, InvalidArgumentError, UnavailableError
from snapshotter.imagefs.documents import ContainerdDocuments
from snapshotter.rpc.blob_writer import Descriptor, metadata_for
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.pb.containerd.services.content.v1 import content_pb2
from tests.fakes.upstream import Upstream, reply

READ = "/containerd.services.content.v1.Content/Read"
WRITE = "/containerd.services.content.v1.Content/Write"
DATA = b"bytes of a blob" * 1000
DIGEST = Digest("sha256", hashlib.sha256(DATA).hexdigest())
SHORT_S = 0.2
LIMIT_S = 10.0


@pytest.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[Upstream]:
    async with Upstream(tmp_path / "containerd.sock") as made:
        yield made


@pytest.fixture
async def client(upstream: Upstream) -> AsyncIterator[Containerd]:
    made = Containerd(upstream.path, SHORT_S, SHORT_S)
    yield made
    await made.close()


def part(data: bytes, offset: int = 0) -> bytes:
    answer = content_pb2.ReadContentResponse(offset=offset, data=data)
    raw: bytes = answer.SerializeToString()
    return raw


async def stuck(requests: Any, context: Any) -> None:
    """Takes one message, answers it, and then does nothing any more."""
    async for _ in requests:
        await context.write(part(DATA[:10]))
        break
    await asyncio.Event().wait()


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_blob_is_read_in_its_parts(upstream: Upstream, client: Containerd) -> None:
    upstream.answers[READ] = reply(part(DATA[:1000]), part(DATA[1000:], 1000))
    assert b"".join([piece async for piece in client.stream_blob("default", DIGEST)]) == DATA
    assert await client.read_blob("default", DIGEST, len(DATA)) == DATA
    with pytest.raises(EmberError, match="over 10 bytes"):
        await client.read_blob("default", DIGEST, 10)


async def test_a_read_that_stands_still_ends(upstream: Upstream, client: Containerd) -> None:
    upstream.answers[READ] = stuck
    got = b""
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(DeadlineError, match=f"{DIGEST} from containerd: no answer within"):
            async for piece in client.stream_blob("default", DIGEST):
                got += piece
        with pytest.raises(DeadlineError):
            await client.read_blob("default", DIGEST, len(DATA))
        await upstream.calls[0].ended.wait()
    assert got == DATA[:10]


@pytest.mark.parametrize("answered", [0, 1, 2])
async def test_a_write_that_stands_still_ends(
    upstream: Upstream, client: Containerd, answered: int
) -> None:
    async def write(requests: Any, context: Any) -> None:
        left = answered
        async for _ in requests:
            if not left:
                await asyncio.Event().wait()
            left -= 1
            await context.write(content_pb2.WriteContentResponse().SerializeToString())

    upstream.answers[WRITE] = write
    blob = Descriptor("text/plain", DIGEST, len(DATA))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(DeadlineError, match=f"writing {DIGEST} to containerd: no answer"):
            await client.write_blob("default", "lease", blob, once(DATA), {})
        await upstream.calls[0].ended.wait()


async def test_a_write_that_ends_without_an_answer_is_an_error(
    upstream: Upstream, client: Containerd
) -> None:
    upstream.answers[WRITE] = reply()
    blob = Descriptor("text/plain", DIGEST, len(DATA))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(UnavailableError, match=f"writing {DIGEST} to containerd"):
            await client.write_blob("default", "lease", blob, once(DATA), {})


class Registry:
    """An origin that has one manifest, which is none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def manifest_bytes(self, reference: str, digest: Digest) -> bytes:
        self.asked.append(reference)
        return DATA

    async def config_bytes(self, reference: str, digest: Digest, size_bytes: int) -> bytes:
        raise AssertionError("there is no config")


async def test_the_registry_is_asked_when_containerd_does_not_answer(
    upstream: Upstream, client: Containerd
) -> None:
    upstream.answers[READ] = stuck
    registry = Registry()
    documents = ContainerdDocuments(client, registry)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EmberError, match="manifest"):
            await documents.image("default", DIGEST, "r.example/app:1")
    assert registry.asked == ["r.example/app:1"]


@pytest.mark.parametrize("name", ["default", "k8s.io", "A-1_b.c", "a" * 76])
def test_a_namespace_that_containerd_knows_goes_with_each_call(name: str) -> None:
    assert metadata_for(name, "l") == (("containerd-namespace", name), ("containerd-lease", "l"))


@pytest.mark.parametrize(
    "name", ["", "ü", "a\0", "a\n", "a b", ".a", "a.", "a..b", "../x", "a" * 77]
)
def test_a_namespace_that_fits_into_no_header_is_refused_at_once(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="no namespace of containerd"):
        metadata_for(name)
