"""A client of containerd's own services: its content, images, leases, differ and snapshots.

Used to read the manifests that containerd has fetched already, to index layers from its content
store, and to pull images into it. Every call has a deadline: containerd may hold its locks while
it waits for this very daemon.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
from google.protobuf import empty_pb2

from snapshotter.content import Digest
from snapshotter.errors import EmberError
from snapshotter.rpc.blob_writer import BlobWriter, Descriptor, metadata_for
from snapshotter.rpc.http2.channel import Channel
from snapshotter.rpc.image_records import Record
from snapshotter.rpc.pb.containerd.services.containers.v1 import containers_pb2, containers_pb2_grpc
from snapshotter.rpc.pb.containerd.services.content.v1 import content_pb2, content_pb2_grpc
from snapshotter.rpc.pb.containerd.services.images.v1 import images_pb2, images_pb2_grpc
from snapshotter.rpc.pb.containerd.services.introspection.v1 import (
    introspection_pb2,
    introspection_pb2_grpc,
)
from snapshotter.rpc.pb.containerd.services.namespaces.v1 import (
    namespace_pb2,
    namespace_pb2_grpc,
)
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2, snapshots_pb2_grpc
from snapshotter.rpc.pb.containerd.services.version.v1 import version_pb2_grpc
from snapshotter.rpc.pb.containerd.types import descriptor_pb2
from snapshotter.rpc.remote import error_from_rpc, within
from snapshotter.rpc.server import MAX_MESSAGE_BYTES

SNAPSHOT_LABEL = "containerd.io/gc.ref.snapshot."
"""With a snapshotter's name: on an image's config, the chainID that it is unpacked to."""
_CRI_LABEL = "io.cri-containerd.image"
MESSAGE_S = 120.0
"""Within this each message of a long transfer must come: a commit syncs gigabytes first."""
_CHANGE_S = 30.0


class Containerd:
    """One channel to containerd's socket; created closed, connects by itself, reconnects too."""

    def __init__(self, address: Path, timeout_s: float, message_s: float = MESSAGE_S) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._message_s = message_s
        self.channel = Channel(address, MAX_MESSAGE_BYTES)
        self._content = content_pb2_grpc.ContentStub(self.channel)
        self._images = images_pb2_grpc.ImagesStub(self.channel)
        self._containers = containers_pb2_grpc.ContainersStub(self.channel)
        self._namespaces = namespace_pb2_grpc.NamespacesStub(self.channel)
        self._version = version_pb2_grpc.VersionStub(self.channel)
        self._introspection = introspection_pb2_grpc.IntrospectionStub(self.channel)
        self._snapshots = snapshots_pb2_grpc.SnapshotsStub(self.channel)

    async def close(self) -> None:
        """Close the channel; calls under way end with UnavailableError."""
        await self.channel.close()

    async def version(self) -> str:
        """containerd's version, such as ``v2.4.2`` or ``1.6.20~ds1``."""
        try:
            reply = await self._version.Version(empty_pb2.Empty(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"containerd at {self.address}") from None
        return str(reply.version)

    async def snapshotter_exports(self, name: str) -> Mapping[str, str] | None:
        """What the snapshotter plugin ``name`` says of itself, None if containerd has none."""
        plugin = await self._plugin(name)
        return dict(plugin.exports) if plugin is not None else None

    async def snapshotter_capabilities(self, name: str) -> list[str]:
        """What the snapshotter plugin ``name`` is said to be able to do."""
        plugin = await self._plugin(name)
        return list(plugin.capabilities) if plugin is not None else []

    async def _plugin(self, name: str) -> introspection_pb2.Plugin | None:
        request = introspection_pb2.PluginsRequest(
            filters=[f"type==io.containerd.snapshotter.v1,id=={json.dumps(name)}"]
        )
        try:
            reply = await self._introspection.Plugins(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"containerd at {self.address}") from None
        return reply.plugins[0] if reply.plugins else None

    async def has_snapshot(self, namespace: str, snapshotter: str, name: str) -> bool:
        """Whether the snapshot ``name`` is there."""
        try:
            await self._snapshots.Stat(
                snapshots_pb2.StatSnapshotRequest(snapshotter=snapshotter, key=name),
                metadata=metadata_for(namespace),
                timeout=self._timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return False
            raise error_from_rpc(error, f"snapshot {name} of containerd") from None
        return True

    async def blob_size(self, namespace: str, digest: Digest) -> int:
        """Stored length of a blob in bytes; NotFoundError if containerd does not have it whole."""
        try:
            reply = await self._content.Info(
                content_pb2.InfoRequest(digest=str(digest)),
                metadata=metadata_for(namespace),
                timeout=self._timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"blob {digest} in containerd") from None
        return int(reply.info.size)

    async def unpacked(self, namespace: str, snapshotter: str) -> set[str]:
        """The chainIDs of the images that containerd believes to be unpacked in ``snapshotter``."""
        label = SNAPSHOT_LABEL + snapshotter
        request = content_pb2.ListContentRequest(filters=[f"labels.{json.dumps(label)}"])
        call = self._content.List(request, metadata=metadata_for(namespace), timeout=_CHANGE_S)
        try:
            return {info.labels[label] async for reply in call for info in reply.info}
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(
                error, f"blobs of containerd at {self.address}, {namespace}"
            ) from None

    async def read_blob(self, namespace: str, digest: Digest, limit_bytes: int) -> bytes:
        """A small blob (a manifest, a config) whole; refuses more than ``limit_bytes``."""
        parts: list[bytes] = []
        size = 0
        async with within(self._timeout_s, f"reading {digest} from containerd"):
            async for part in self.stream_blob(namespace, digest):
                size += len(part)
                if size > limit_bytes:
                    raise EmberError(f"{digest} in containerd is over {limit_bytes} bytes")
                parts.append(part)
        return b"".join(parts)

    async def stream_blob(self, namespace: str, digest: Digest) -> AsyncIterator[bytes]:
        """The bytes of a blob of containerd's content store, in order."""
        request = content_pb2.ReadContentRequest(digest=str(digest))
        call = self._content.Read(request, metadata=metadata_for(namespace))
        doing = f"reading {digest} from containerd"
        try:
            while True:
                async with within(self._message_s, doing):
                    reply = await call.read()
                if not isinstance(reply, content_pb2.ReadContentResponse):
                    return
                yield reply.data
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, doing) from None
        finally:
            call.cancel()

    async def write_blob(
        self,
        namespace: str,
        lease: str,
        descriptor: Descriptor,
        data: AsyncIterator[bytes],
        labels: Mapping[str, str],
    ) -> None:
        """Put a blob into the content store under ``lease``; containerd verifies its digest."""
        writer = BlobWriter(self._content, namespace, lease, descriptor, self._message_s)
        await writer.write(data, labels)

    async def put_image(self, namespace: str, name: str, target: Descriptor) -> None:
        """Create or move the image ``name``; the kubelet and ``ctr`` see it from then on."""
        image = images_pb2.Image(
            name=name,
            target=descriptor_pb2.Descriptor(
                media_type=target.media_type, digest=str(target.digest), size=target.size_bytes
            ),
        )
        metadata = metadata_for(namespace)
        try:
            try:
                await self._images.Create(
                    images_pb2.CreateImageRequest(image=image),
                    metadata=metadata,
                    timeout=_CHANGE_S,
                )
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                    raise
                await self._images.Update(
                    images_pb2.UpdateImageRequest(image=image, update_mask={"paths": ["target"]}),
                    metadata=metadata,
                    timeout=_CHANGE_S,
                )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"image {name} in containerd") from None

    async def image_records(self, namespace: str) -> list[Record]:
        """The images of one namespace, by name."""
        try:
            reply = await self._images.List(
                images_pb2.ListImagesRequest(),
                metadata=metadata_for(namespace),
                timeout=self._timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(
                error, f"images of containerd at {self.address}, {namespace}"
            ) from None
        return [
            Record(namespace, image.name, image.target.digest, _CRI_LABEL in image.labels)
            for image in reply.images
        ]

    async def delete_image(self, namespace: str, name: str) -> None:
        """Remove the image record ``name`` and let containerd collect what only it needed."""
        try:
            await self._images.Delete(
                images_pb2.DeleteImageRequest(name=name, sync=True),
                metadata=metadata_for(namespace),
                timeout=60,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"image {name} in containerd") from None

    async def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        try:
            reply = await self._namespaces.List(
                namespace_pb2.ListNamespacesRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"namespaces of containerd at {self.address}") from None
        return [namespace.name for namespace in reply.namespaces]

    async def containers(self, namespace: str, snapshotter: str) -> list[tuple[str, str]]:
        """(container id, image name) of the containers on ``snapshotter`` in ``namespace``."""
        try:
            reply = await self._containers.List(
                containers_pb2.ListContainersRequest(),
                metadata=metadata_for(namespace),
                timeout=self._timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"containers of containerd at {self.address}") from None
        return [(c.id, c.image) for c in reply.containers if c.snapshotter == snapshotter]
