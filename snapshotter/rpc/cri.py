"""A client of containerd's CRI image service: pulls as the kubelet would, where CRI uses Ember.

Which snapshotter CRI uses is told by the file system that it says images are on, the only place
where 1.6 and 2.x both tell it: the proxy plugin's exported root, or (without one) a directory of
containerd's named after the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from snapshotter.content import Digest, chain_ids
from snapshotter.errors import EmberError
from snapshotter.oci.credentials import Login
from snapshotter.oci.resolver import ResolvedImage
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.pb.cri import images_pb2, images_pb2_grpc
from snapshotter.rpc.pull import PullStep
from snapshotter.rpc.remote import error_from_rpc
from snapshotter.tasks import end_all

NAMESPACE = "k8s.io"
"""The only namespace that CRI works in."""
PULL_S = 3600.0
ASK_S = 5.0
_LOOK_S = 0.5
_DISABLED = "disableSnapshotAnnotations"


async def image_root(containerd: Containerd) -> Path | None:
    """Where CRI says that its images are, of several snapshotters the default one's; None if no
    CRI is served here."""
    stub = images_pb2_grpc.ImageServiceStub(containerd.channel)
    try:
        reply = await stub.ImageFsInfo(images_pb2.ImageFsInfoRequest(), timeout=ASK_S)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise error_from_rpc(error, "asking CRI where its images are") from None
    # The default one's comes first: the kubelet looks at nothing else.
    points = [usage.fs_id.mountpoint for usage in reply.image_filesystems]
    return Path(points[0]) if points and points[0] else None


async def uses(containerd: Containerd, snapshotter: str) -> bool:
    """Whether CRI is served here and unpacks its images into ``snapshotter``."""
    place = await image_root(containerd)
    if place is None:
        return False
    exports = await containerd.snapshotter_exports(snapshotter)
    if exports is None:
        return False
    exported = exports.get("root", "")
    return place.name == f"io.containerd.snapshotter.v1.{snapshotter}" or str(place) == exported


async def sends_labels(containerd: Containerd) -> bool | None:
    """Whether CRI tells a snapshotter whose layers it prepares; None where it doesn't tell us
    (2.x keeps that setting with its images, which its status leaves out)."""
    stub = images_pb2_grpc.RuntimeServiceStub(containerd.channel)
    try:
        reply = await stub.Status(images_pb2.StatusRequest(verbose=True), timeout=ASK_S)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise error_from_rpc(error, "asking CRI for its configuration") from None
    try:
        disabled = json.loads(reply.info.get("config", "{}"))["containerd"][_DISABLED]
    except (ValueError, KeyError, TypeError):
        return None
    return not disabled


async def home(containerd: Containerd, snapshotter: str) -> str:
    """The namespace of who says none: the kubelet's where CRI uses ``snapshotter``."""
    return NAMESPACE if await uses(containerd, snapshotter) else "default"


class CriPuller:
    """Has CRI pull; ``is_lazy`` says whether an image's layers were answered for."""

    def __init__(
        self, containerd: Containerd, snapshotter: str, is_lazy: Callable[[Digest], bool]
    ) -> None:
        self._containerd = containerd
        self._snapshotter = snapshotter
        self._is_lazy = is_lazy
        self._images = images_pb2_grpc.ImageServiceStub(containerd.channel)

    async def pull(
        self, image: ResolvedImage, login: Login | None, report: Callable[[PullStep], None]
    ) -> None:
        """Bring ``image`` to where the kubelet looks for it, with ``login`` if there is one."""
        pulling = asyncio.create_task(self._pull(str(image.reference), login))
        try:
            await self._follow(image, pulling, report)
            await pulling
        finally:
            await end_all([pulling])

    async def _pull(self, name: str, login: Login | None) -> None:
        request = images_pb2.PullImageRequest(image=images_pb2.ImageSpec(image=name))
        if login is not None:
            credential = login.credential
            request.auth.CopyFrom(
                images_pb2.AuthConfig(
                    username=credential.username,
                    password=credential.password,
                    # Without it containerd would show the credential to every mirror.
                    server_address=f"https://{login.authority}",
                    identity_token=credential.identity_token,
                    registry_token=credential.registry_token,
                )
            )
        try:
            await self._images.PullImage(request, timeout=PULL_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"CRI's pull of {name}") from None

    async def _follow(
        self, image: ResolvedImage, pulling: asyncio.Task[None], report: Callable[[PullStep], None]
    ) -> None:
        """CRI says nothing until it is done; its snapshots appear one by one, lowest first."""
        chain = chain_ids([layer.diff_id for layer in image.layers])
        position = 0
        while position < len(chain):
            done = pulling.done()
            if done and pulling.exception() is not None:
                return
            here = await self._committed(chain[position:]) if not done else len(chain) - position
            state = "lazy" if self._is_lazy(image.manifest_digest) else "unpacked"
            for n in range(position, position + here):
                report(PullStep(n, len(chain), image.layers[n].digest, state))
            position += here
            if position < len(chain):
                layer = image.layers[position]
                report(PullStep(position, len(chain), layer.digest, "fetching"))
                await asyncio.wait([pulling], timeout=_LOOK_S)

    async def _committed(self, chain: Sequence[Digest]) -> int:
        """How many of ``chain`` are there, counted from its start."""
        with contextlib.suppress(EmberError):
            for n, chain_id in enumerate(chain):
                if not await self._containerd.has_snapshot(
                    NAMESPACE, self._snapshotter, str(chain_id)
                ):
                    return n
            return len(chain)
        return 0
