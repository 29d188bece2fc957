"""Registry clients for tests: short deadlines, no files of the machine, a clock that skips."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from snapshotter.content import BlobRef, Extent
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.oci.credentials import MemoryCredentials
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.registry import RegistryClient
from tests.fakes.certificates import Authority
from tests.fakes.http2_wire import speak_http2
from tests.fakes.registry import FakeRegistry
from tests.fakes.skipping_clock import SkippingClock

QUICK = TransportLimits(connect_s=2, idle_s=0.3)
NOWHERE = Path("/nonexistent")


@asynccontextmanager
async def registry_client(
    *,
    certs: Path = NOWHERE,
    limits: TransportLimits = QUICK,
    pulls: MemoryCredentials | None = None,
    clock: SkippingClock | None = None,
    docker_configs: tuple[Path, ...] = (),
    kubelet: tuple[Path, Path] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[RegistryClient]:
    """A client that knows only what the test gives it."""
    settings = RegistrySettings(
        certs_dirs=(certs,),
        docker_configs=docker_configs,
        kubelet_config=kubelet[0] if kubelet else None,
        kubelet_programs_dir=kubelet[1] if kubelet else None,
        limits=limits,
    )
    client = open_registry(
        settings, clock or SkippingClock(), pulls=pulls, environment=environment or {}
    )
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def registry_with(data: bytes) -> AsyncIterator[tuple[FakeRegistry, BlobRef]]:
    """A registry that holds one blob."""
    async with FakeRegistry() as registry:
        digest = registry.add_blob("team/app", data)
        yield registry, BlobRef(f"{registry.authority}/team/app", digest, len(data))


@asynccontextmanager
async def secure_registry_with(
    data: bytes, folder: Path, *, http2: bool = True, place: str = ""
) -> AsyncIterator[tuple[FakeRegistry, BlobRef]]:
    """The same over TLS, and HTTP/2 beside HTTP/1.1; ``folder`` will do for ``certs``.

    ``place`` is the name and port that it is called by, which may lead there through a proxy.
    """
    authority = Authority(folder)
    context = authority.server_context()
    registry = FakeRegistry(context)
    if http2:
        speak_http2(registry, context)
    digest = registry.add_blob("team/app", data)
    async with registry:
        place = place or registry.authority
        (folder / place).mkdir()
        hosts = f'server = "https://{place}"\nca = "{authority.path}"\n'
        (folder / place / "hosts.toml").write_text(hosts)
        yield registry, BlobRef(f"{place}/team/app", digest, len(data))


async def read(client: RegistryClient, blob: BlobRef, extent: Extent) -> bytes:
    return b"".join([chunk async for chunk in client.read(blob, extent)])


async def stream(client: RegistryClient, blob: BlobRef) -> bytes:
    return b"".join([chunk async for chunk in client.stream(blob)])
