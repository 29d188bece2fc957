"""The registries as the sharing of indexes needs them: is an artifact there, and if not, push one.

The image is resolved anew, so that what is pushed refers to what its repository has.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import ConfigError, EmberError, RefusedError
from snapshotter.imagefs.sharing import Placed
from snapshotter.indexes.artifact import ARTIFACT_TYPE
from snapshotter.indexes.find import Found, likely, load
from snapshotter.indexes.keys import Keyring, SigningKey, TrustedKeys, load_signing_key
from snapshotter.indexes.publish import LocalIndex, RegistryTarget, Subject, publish
from snapshotter.oci.platform import host_platform
from snapshotter.oci.pushing import Pusher
from snapshotter.oci.reference import Reference, parse_reference
from snapshotter.oci.registry import RegistryClient


class RegistryPublisher:
    """Implements sharing.Publisher; ``sign_key`` is read at each push."""

    def __init__(
        self, registry: RegistryClient, sign_key: Path | None, trusted: TrustedKeys, clock: Clock
    ) -> None:
        self._registry = registry
        self._sign_key = sign_key
        self._trusted = trusted
        self._clock = clock

    async def gives(self, blob: BlobRef) -> None:
        """See admission.Giver."""
        await self._registry.check(blob)

    def keys(self) -> Collection[str] | None:
        """See sharing.Publisher."""
        if self._sign_key is None:
            return None
        known = set(self._trusted.read().keys)
        with contextlib.suppress(ConfigError):  # said when something is to be pushed
            known.add(load_signing_key(self._sign_key).key_id)
        return known

    async def publish(
        self, repository: str, image: Digest, indexes: Sequence[LocalIndex]
    ) -> Placed:
        """See sharing.Publisher."""
        keys = [load_signing_key(self._sign_key)] if self._sign_key is not None else []
        pinned = parse_reference(repository).with_digest(image)
        there = await self._there(pinned, indexes, keys)
        if there is not None:
            return Placed(False, there.key_id or "")
        resolved = await self._registry.resolve(pinned, host_platform())
        if {layer.digest for layer in resolved.layers} != {one.index.layer for one in indexes}:
            raise RefusedError(f"{pinned}: its layers are not those that were indexed")
        subject = Subject.of(resolved)
        pusher = Pusher(self._registry.asker, pinned, self._clock)
        await publish(subject, indexes, keys, RegistryTarget(pusher, subject))
        return Placed(True, keys[0].key_id if keys else "")

    async def _there(
        self, image: Reference, indexes: Sequence[LocalIndex], keys: Sequence[SigningKey]
    ) -> Found | None:
        """What somebody has pushed that serves as well: for all layers, and signed by us or by whom
        we trust if we sign; else the very same indexes."""
        known = self._trusted.read().keys | {key.key_id: key.key.public_key() for key in keys}
        plain = await asyncio.to_thread(_plain_digests, indexes)
        ring = Keyring(known)
        for entry in likely(await self._registry.referrers(image, ARTIFACT_TYPE), ring):
            try:
                found = await load(self._registry, image, entry.digest, ring, entry.size_bytes)
            except EmberError:
                continue  # one that can't be used stands in nobody's way
            if _serves(found, plain, signed=bool(keys)):
                return found
        return None


def _serves(found: Found, plain: dict[Digest, Digest], *, signed: bool) -> bool:
    there = {layer.layer: layer.plain.digest for layer in found.artifact.layers}
    if not signed:
        return there == plain
    return found.key_id is not None and there.keys() == plain.keys()


def _plain_digests(indexes: Sequence[LocalIndex]) -> dict[Digest, Digest]:
    return {
        one.index.layer: Digest("sha256", hashlib.sha256(one.index.data).hexdigest())
        for one in indexes
    }
