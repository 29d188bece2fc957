"""A registry that holds an image with its signed index artifact, made by the code that ships."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshotter.indexes.build import Builder, Step
from snapshotter.indexes.cache import IndexCache
from snapshotter.indexes.keys import Keyring, SigningKey, key_id
from snapshotter.indexes.publish import Published, RegistryTarget, Subject, publish
from snapshotter.oci.platform import host_platform
from snapshotter.oci.pushing import Pusher
from snapshotter.oci.reference import Reference, parse_reference
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.resolver import ResolvedImage
from tests.cases.images import ImageCase, gzipped, image, zstandarded
from tests.cases.tars import file, layer
from tests.fakes.clients import registry_client
from tests.fakes.served import offered
from tests.fakes.skipping_clock import SkippingClock
from tests.fakes.writable import WritableRegistry
from tests.unit.image.layers import text

PLAIN = layer(file(b"large", text(3_000_000)))
CASE = image("a scene", [gzipped(PLAIN), zstandarded(layer(file(b"small", b"x" * 5000)))])


def new_key() -> SigningKey:
    """A key that nobody has."""
    key = Ed25519PrivateKey.generate()
    return SigningKey(key_id(key.public_key()), key)


KEY = new_key()
RING = Keyring({KEY.key_id: KEY.key.public_key()})


@dataclass
class Scene:
    """The registry, a client of it, the image, and what was published."""

    registry: WritableRegistry
    client: RegistryClient
    image: ResolvedImage
    published: Published | None
    directory: Path
    steps: list[Step]

    @property
    def pinned(self) -> Reference:
        return self.image.reference.with_digest(self.image.manifest_digest)


async def build_into(
    client: RegistryClient,
    resolved: ResolvedImage,
    directory: Path,
    steps: list[Step],
    key: SigningKey | None = KEY,
) -> Published:
    """Build and publish as the command does."""
    cache = IndexCache(directory, SkippingClock())
    builder = Builder(client, cache, steps.append, parallel=2)
    try:
        built = await builder.build(resolved)
    finally:
        builder.close()
    subject = Subject.of(resolved)
    pusher = Pusher(client.asker, resolved.reference, SkippingClock())
    target = RegistryTarget(pusher, subject)
    keys = [] if key is None else [key]
    return await publish(subject, [one.local for one in built], keys, target)


@asynccontextmanager
async def scene(
    directory: Path, case: ImageCase = CASE, *, api: bool = True, key: SigningKey | None = KEY
) -> AsyncIterator[Scene]:
    """An image that is indexed and signed by ``key``; nothing is published without one."""
    async with WritableRegistry(api=api) as registry, registry_client() as client:
        reference = parse_reference(offered(registry, case))
        resolved = await client.resolve(reference, host_platform())
        steps: list[Step] = []
        published = None
        if key is not None:
            published = await build_into(client, resolved, directory / "cache", steps, key)
        registry.seen.clear()
        yield Scene(registry, client, resolved, published, directory, steps)
