"""A client of containerd's CRI image service: pulls as the kubelet would, where CRI uses Ember.

Which snapshotter CRI uses is told by the file system that it says images are on: the proxy plugin's
exported root, or (before exports) a directory of containerd's named after the plugin.
"""

from __future__ import annotations

from pathlib import Path

import grpc

from snapshotter.rpc.pb.cri import images_pb2, images_pb2_grpc
from snapshotter.rpc.remote import error_from_rpc

NAMESPACE = "k8s.io"
"""The only namespace that CRI works in."""
PULL_S = 3600.0


class CriImages:
    """One channel's image service."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._images = images_pb2_grpc.ImageServiceStub(channel)
        self._timeout_s = timeout_s

    async def uses(self, snapshotter: str, root: Path) -> bool:
        """Whether CRI is there and keeps its images with ``snapshotter`` (cache at ``root``)."""
        try:
            reply = await self._images.ImageFsInfo(
                images_pb2.ImageFsInfoRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError:
            return False
        points = [usage.fs_id.mountpoint for usage in reply.image_filesystems]
        ours = f"io.containerd.snapshotter.v1.{snapshotter}"
        return any(point == str(root) or Path(point).name == ours for point in points)

    async def pull(self, image: str) -> str:
        """Have CRI pull ``image``; the reference (by config digest) that it answers with."""
        request = images_pb2.PullImageRequest(image=images_pb2.ImageSpec(image=image))
        try:
            reply = await self._images.PullImage(request, timeout=PULL_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"CRI's pull of {image}") from None
        return str(reply.image_ref)
