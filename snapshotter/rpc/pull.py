"""`ember pull`: an image into containerd, with the labels that let a snapshotter serve it lazily.

Works the same against containerd 1.6 and 2.x, because it uses only what all of them serve: content,
leases, snapshots, differ, images. Layers that the snapshotter answers for are not fetched; for the
others this is a complete pull.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from snapshotter.content import BlobRef, Digest, chain_ids
from snapshotter.errors import (
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
)
from snapshotter.oci.documents import OCI_CONFIG
from snapshotter.oci.resolver import ResolvedImage
from snapshotter.rpc.blob_writer import Descriptor, metadata_for
from snapshotter.rpc.containerd import SNAPSHOT_LABEL, Containerd
from snapshotter.rpc.leases import PullLeases
from snapshotter.rpc.pb.containerd.services.diff.v1 import diff_pb2, diff_pb2_grpc
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2, snapshots_pb2_grpc
from snapshotter.rpc.pb.containerd.types import descriptor_pb2, mount_pb2
from snapshotter.rpc.remote import error_from_rpc
from snapshotter.snapshots.labels import (
    DIFF_ID,
    IMAGE_LAYERS,
    IMAGE_REF,
    LAYER_DIGEST,
    MANIFEST_DIGEST,
    MAX_LABEL_BYTES,
    SNAPSHOT_REF,
)

REDIALS = 10
REDIAL_S = 0.5
_APPLY_SECONDS = 3600


class Origin(Protocol):
    """The registry, as far as a pull needs it."""

    def stream(self, blob: BlobRef) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class PullStep:
    """Progress: layer ``position`` of ``total`` is ``state`` now (lazy, fetching, unpacked)."""

    position: int
    total: int
    digest: Digest
    state: str


def layer_labels(image: ResolvedImage, position: int, chain_id: Digest) -> dict[str, str]:
    """What containerd's own unpacker tells a remote snapshotter about layer ``position``."""
    above = ""
    for layer in image.layers[position:]:
        longer = f"{above},{layer.digest}" if above else str(layer.digest)
        if len(IMAGE_LAYERS) + len(longer) > MAX_LABEL_BYTES:
            break
        above = longer
    return {
        SNAPSHOT_REF: str(chain_id),
        IMAGE_REF: str(image.reference),
        MANIFEST_DIGEST: str(image.manifest_digest),
        LAYER_DIGEST: str(image.layers[position].digest),
        IMAGE_LAYERS: above,
        DIFF_ID: str(image.layers[position].diff_id),
    }


class Puller:
    """Pulls resolved images into one containerd for one snapshotter name."""

    def __init__(
        self, containerd: Containerd, leases: PullLeases, origin: Origin, snapshotter: str
    ) -> None:
        self._containerd = containerd
        self._leases = leases
        self._origin = origin
        self._snapshotter = snapshotter
        self._snapshots = snapshots_pb2_grpc.SnapshotsStub(containerd.channel)
        self._diff = diff_pb2_grpc.DiffStub(containerd.channel)

    async def pull(
        self,
        image: ResolvedImage,
        namespace: str,
        report: Callable[[PullStep], None] = lambda step: None,
    ) -> None:
        """Bring ``image`` into ``namespace``; a pull that was cut short is done again."""
        async with self._leases.hold(namespace) as lease:
            chain = chain_ids([layer.diff_id for layer in image.layers])
            await self._write_documents(image, namespace, lease)
            for position in range(len(image.layers)):
                await self._layer(image, position, chain, namespace, lease, report)
            if chain:
                await self._hold_snapshots(image, chain[-1], namespace, lease)
            await self._containerd.put_image(namespace, str(image.reference), _target(image))

    async def _hold_snapshots(
        self, image: ResolvedImage, top: Digest, namespace: str, lease: str
    ) -> None:
        """Let the config hold the top snapshot: once it is there, or a pull that is cut short would
        leave word of snapshots that never were."""
        descriptor = Descriptor(OCI_CONFIG, image.config_digest, len(image.config))
        labels = {SNAPSHOT_LABEL + self._snapshotter: str(top)}
        await self._containerd.write_blob(namespace, lease, descriptor, _once(image.config), labels)

    async def _write_documents(self, image: ResolvedImage, namespace: str, lease: str) -> None:
        name = image.reference
        source = {f"containerd.io/distribution.source.{name.registry}": name.repository}
        config = {**source}
        manifest = {**source, "containerd.io/gc.ref.content.config": str(image.config_digest)}
        for n, layer in enumerate(image.layers):
            manifest[f"containerd.io/gc.ref.content.l.{n}"] = str(layer.digest)
        documents = [
            (OCI_CONFIG, image.config_digest, image.config, config),
            (image.manifest_media_type, image.manifest_digest, image.manifest, manifest),
        ]
        if image.index is not None:
            refers = {**source, "containerd.io/gc.ref.content.m.0": str(image.manifest_digest)}
            documents.append((image.target_media_type, image.target_digest, image.index, refers))
        for media_type, digest, data, labels in documents:
            descriptor = Descriptor(media_type, digest, len(data))
            await self._containerd.write_blob(namespace, lease, descriptor, _once(data), labels)

    async def _layer(
        self,
        image: ResolvedImage,
        position: int,
        chain: Sequence[Digest],
        namespace: str,
        lease: str,
        report: Callable[[PullStep], None],
    ) -> None:
        layer = image.layers[position]
        chain_id = chain[position]

        def tell(state: str) -> None:
            report(PullStep(position, len(image.layers), layer.digest, state))

        key = f"extract-{namespace}-{secrets.token_hex(6)} {chain_id}"
        request = snapshots_pb2.PrepareSnapshotRequest(
            snapshotter=self._snapshotter,
            key=key,
            parent=str(chain[position - 1]) if position else "",
            labels=layer_labels(image, position, chain_id),
        )
        meta = metadata_for(namespace, lease)
        try:
            prepared = await self._prepare(request, meta)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise error_from_rpc(error, f"layer {layer.digest}") from None
            tell("lazy")
            return
        try:
            tell("fetching")
            await self._fetch(image, position, namespace, lease)
            await self._unpack(image, position, list(prepared.mounts), meta)
            await self._commit(key, chain_id, request.labels, meta)
            tell("unpacked")
        except BaseException:
            remove = snapshots_pb2.RemoveSnapshotRequest(snapshotter=self._snapshotter, key=key)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await asyncio.shield(self._snapshots.Remove(remove, metadata=meta, timeout=30))
            raise

    async def _prepare(
        self, request: snapshots_pb2.PrepareSnapshotRequest, meta: tuple[tuple[str, str], ...]
    ) -> snapshots_pb2.PrepareSnapshotResponse:
        """containerd redials within three seconds after a restart of the snapshotter."""
        for _ in range(REDIALS):
            try:
                return await self._snapshots.Prepare(request, metadata=meta, timeout=60)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(REDIAL_S)
        return await self._snapshots.Prepare(request, metadata=meta, timeout=60)

    async def _fetch(self, image: ResolvedImage, position: int, namespace: str, lease: str) -> None:
        layer = image.layers[position]
        descriptor = Descriptor(layer.media_type, layer.digest, layer.size)
        with contextlib.suppress(NotFoundError):
            await self._containerd.blob_size(namespace, layer.digest)
            return
        with contextlib.suppress(AlreadyExistsError):
            await self._containerd.write_blob(
                namespace, lease, descriptor, self._origin.stream(image.blob(layer)), {}
            )

    async def _unpack(
        self,
        image: ResolvedImage,
        position: int,
        mounts: list[mount_pb2.Mount],
        meta: tuple[tuple[str, str], ...],
    ) -> None:
        layer = image.layers[position]
        request = diff_pb2.ApplyRequest(
            diff=descriptor_pb2.Descriptor(
                media_type=layer.media_type, digest=str(layer.digest), size=layer.size
            ),
            mounts=mounts,
        )
        try:
            reply = await self._diff.Apply(request, metadata=meta, timeout=_APPLY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"unpacking {layer.digest}") from None
        if reply.applied.digest != str(layer.diff_id):
            raise CorruptError(
                f"layer {layer.digest} of {image.reference} unpacks to {reply.applied.digest},"
                f" but the image's config promises {layer.diff_id}"
            )

    async def _commit(
        self,
        key: str,
        chain_id: Digest,
        labels: object,
        meta: tuple[tuple[str, str], ...],
    ) -> None:
        request = snapshots_pb2.CommitSnapshotRequest(
            snapshotter=self._snapshotter,
            name=str(chain_id),
            key=key,
            labels=labels,
        )
        try:
            await self._snapshots.Commit(request, metadata=meta, timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise error_from_rpc(error, f"committing {chain_id}") from None
            remove = snapshots_pb2.RemoveSnapshotRequest(snapshotter=self._snapshotter, key=key)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._snapshots.Remove(remove, metadata=meta, timeout=30)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _target(image: ResolvedImage) -> Descriptor:
    """What the image record points at: the index if it names the manifest itself, else that.

    Of nested indexes only the outermost is at hand, and containerd would miss the one between.
    """
    if image.index is not None and image.manifest_digest.hex.encode() in image.index:
        return Descriptor(image.target_media_type, image.target_digest, len(image.index))
    return Descriptor(image.manifest_media_type, image.manifest_digest, len(image.manifest))
