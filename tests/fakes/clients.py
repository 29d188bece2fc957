"""Registry clients for tests: short deadlines, no files of the machine, a clock that skips."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from snapshotter.content import BlobRef, Extent
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.oci.credentials import MemoryCredentials
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.transport import TransportLimits
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


async def read(client: RegistryClient, blob: BlobRef, extent: Extent) -> bytes:
    return b"".join([chunk async for chunk in client.read(blob, extent)])


async def stream(client: RegistryClient, blob: BlobRef) -> bytes:
    return b"".join([chunk async for chunk in client.stream(blob)])
