"""The client against Debian's docker-registry: what our own registry plays is so in a real one."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import NotFoundError, UnauthorizedError, UnavailableError
from snapshotter.oci.credentials import Credential, MemoryCredentials
from snapshotter.oci.documents import OCI_INDEX, OCI_MANIFEST
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import parse_reference
from tests.fakes.clients import read, registry_client, stream
from tests.fakes.gates import basic
from tests.fakes.images import config_of, descriptor, index_of, manifest_of
from tests.fakes.registry import sha256
from tests.patience import until

AMD64 = Platform("linux", "amd64")
LAYERS = [bytes(range(256)) * 2000, b"second layer" * 5000]
USER = Credential("user", "pass:word")
HTPASSWD = "user:$2b$05$abcdefghijklmnopqrstuuDIEddBSuRWBBEY6g5zv60IAP5bSSfki\n"


@dataclass
class RealRegistry:
    """A running docker-registry with a data folder of its own."""

    authority: str
    folder: Path
    process: asyncio.subprocess.Process

    async def push(
        self, repository: str, blobs: Sequence[bytes], manifest: bytes, tag: str
    ) -> None:
        """Put an image there byte for byte."""
        headers = {"Authorization": basic(USER.username, USER.password)}
        base = f"http://{self.authority}/v2/{repository}"
        async with aiohttp.ClientSession(headers=headers) as session:
            for blob in blobs:
                async with session.post(f"{base}/blobs/uploads/") as started:
                    assert started.status == 202, await started.text()
                    place = started.headers["Location"]
                separator = "&" if "?" in place else "?"
                url = f"{place}{separator}digest={sha256(blob)}"
                async with session.put(url, data=blob) as done:
                    assert done.status == 201, await done.text()
            media_type = json.loads(manifest)["mediaType"]
            headers = {"Content-Type": media_type}
            url = f"{base}/manifests/{tag}"
            async with session.put(url, data=manifest, headers=headers) as done:
                assert done.status == 201, await done.text()

    def delete(self, digest: Digest) -> None:
        """Take a blob away, as garbage collection on the other side would."""
        blobs = self.folder / "docker/registry/v2/blobs"
        shutil.rmtree(blobs / digest.algorithm / digest.hex[:2] / digest.hex)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_up(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def real_registry(folder: Path, *, htpasswd: bool = False) -> AsyncIterator[RealRegistry]:
    port = free_port()
    config: dict[str, object] = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    if htpasswd:
        (folder / "htpasswd").write_text(HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        "docker-registry",
        "serve",
        str(folder / "config.yml"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert await asyncio.to_thread(until, lambda: is_up(port)), "docker-registry did not start"
        yield RealRegistry(f"127.0.0.1:{port}", folder / "data", process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def push_app(registry: RealRegistry) -> bytes:
    config = config_of(LAYERS)
    manifest = manifest_of(config, LAYERS)
    await registry.push("team/app", [config, *LAYERS], manifest, "v1")
    return manifest


async def test_an_image_is_resolved_read_and_streamed(tmp_path: Path) -> None:
    async with real_registry(tmp_path) as registry, registry_client() as client:
        manifest = await push_app(registry)
        reference = parse_reference(f"{registry.authority}/team/app:v1")
        image = await client.resolve(reference, AMD64)
        assert image.manifest == manifest
        pinned = await client.resolve(reference.with_digest(image.manifest_digest), AMD64)
        assert pinned.layers == image.layers
        for layer, data in zip(image.layers, LAYERS, strict=True):
            blob = image.blob(layer)
            assert await stream(client, blob) == data
            for extent in (Extent(0, 1), Extent(1000, 30_000), Extent(len(data) - 1, 1)):
                found = await read(client, blob, extent)
                assert found == data[extent.offset : extent.end]


async def test_an_index_leads_to_this_platform_s_image(tmp_path: Path) -> None:
    async with real_registry(tmp_path) as registry, registry_client() as client:
        manifest = await push_app(registry)
        entry = descriptor(
            manifest, OCI_MANIFEST, platform={"os": "linux", "architecture": "amd64"}
        )
        index = index_of(entry)
        await registry.push("team/app", [], index, "multi")
        image = await client.resolve(parse_reference(f"{registry.authority}/team/app:multi"), AMD64)
        assert image.target_media_type == OCI_INDEX
        assert (image.index, image.manifest) == (index, manifest)


async def test_a_password_is_wanted_and_given(tmp_path: Path) -> None:
    async with real_registry(tmp_path, htpasswd=True) as registry:
        await push_app(registry)
        pulls = MemoryCredentials()
        reference = parse_reference(f"{registry.authority}/team/app:v1")
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(UnauthorizedError):
                await client.resolve(reference, AMD64)
            pulls.put(str(reference), Credential("user", "wrong"))
            with pytest.raises(UnauthorizedError):
                await client.resolve(reference, AMD64)
            pulls.put(str(reference), USER)
            image = await client.resolve(reference, AMD64)
            blob = image.blob(image.layers[0])
            assert await read(client, blob, Extent(10, 10)) == LAYERS[0][10:20]


async def test_what_is_gone_is_not_found(tmp_path: Path) -> None:
    async with real_registry(tmp_path) as registry, registry_client() as client:
        await push_app(registry)
        with pytest.raises(NotFoundError):
            await client.resolve(parse_reference(f"{registry.authority}/team/none:v1"), AMD64)
        blob = BlobRef(f"{registry.authority}/team/app", sha256(LAYERS[0]), len(LAYERS[0]))
        assert await read(client, blob, Extent(10, 10)) == LAYERS[0][10:20]
        registry.delete(blob.digest)
        with pytest.raises(NotFoundError):
            await read(client, blob, Extent(10, 10))
        registry.process.kill()
        await registry.process.wait()
        with pytest.raises(UnavailableError):
            await read(client, blob, Extent(10, 10))
