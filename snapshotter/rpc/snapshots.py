"""containerd's snapshots service over a Snapshotter: wire messages in, values out, nothing else.

The field ``snapshotter`` of requests is containerd's name for the plugin; one socket serves one
snapshotter, so it is not looked at.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp

from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc as pb_grpc
from snapshotter.rpc.pb.containerd.types import mount_pb2
from snapshotter.rpc.status import status_of
from snapshotter.snapshots.model import Info, Mount
from snapshotter.snapshots.snapshotter import Snapshotter

T = TypeVar("T")

NAMESPACE_KEY = "containerd-namespace"
DEFAULT_NAMESPACE = "default"
BLOCK = 100
"""Infos in one message of List, as containerd itself sends them."""
_MOST_KEPT = 16_384


class Context(Protocol):
    """What is used of grpc.aio's ServicerContext."""

    def invocation_metadata(self) -> Any: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> Any: ...


class SnapshotsService(pb_grpc.SnapshotsServicer):  # type: ignore[misc]
    """The ten verbs. Every error leaves as a status (rpc/status.py)."""

    def __init__(self, snapshotter: Snapshotter) -> None:
        self._snapshotter = snapshotter
        self._messages: dict[str, tuple[Info, Any]] = {}

    async def Prepare(self, request: Any, context: Context) -> Any:  # noqa: N802
        mounts = await _answer(
            context,
            "Prepare",
            self._snapshotter.prepare(
                request.key,
                request.parent,
                dict(request.labels),
                namespace_of(context, request.key),
            ),
        )
        return pb.PrepareSnapshotResponse(mounts=_mounts(mounts))

    async def View(self, request: Any, context: Context) -> Any:  # noqa: N802
        work = self._snapshotter.view(request.key, request.parent, dict(request.labels))
        return pb.ViewSnapshotResponse(mounts=_mounts(await _answer(context, "View", work)))

    async def Mounts(self, request: Any, context: Context) -> Any:  # noqa: N802
        mounts = await _answer(context, "Mounts", self._snapshotter.mounts(request.key))
        return pb.MountsResponse(mounts=_mounts(mounts))

    async def Commit(self, request: Any, context: Context) -> Any:  # noqa: N802
        work = self._snapshotter.commit(
            request.name, request.key, dict(request.labels), request.parent
        )
        await _answer(context, "Commit", work)
        return Empty()

    async def Remove(self, request: Any, context: Context) -> Any:  # noqa: N802
        await _answer(context, "Remove", self._snapshotter.remove(request.key))
        return Empty()

    async def Stat(self, request: Any, context: Context) -> Any:  # noqa: N802
        info = await _answer(context, "Stat", self._snapshotter.stat(request.key))
        return pb.StatSnapshotResponse(info=_info(info))

    async def Update(self, request: Any, context: Context) -> Any:  # noqa: N802
        work = self._snapshotter.update(
            request.info.name, dict(request.info.labels), list(request.update_mask.paths)
        )
        return pb.UpdateSnapshotResponse(info=_info(await _answer(context, "Update", work)))

    async def List(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        blocks = self._snapshotter.walk(list(request.filters), BLOCK)
        while True:
            block = await _answer(context, "List", _next(blocks))
            if block is None:
                return
            yield pb.ListSnapshotsResponse(info=[self._listed(info) for info in block])

    def _listed(self, info: Info) -> Any:
        """The message of an Info, made once: building it costs more than to read and send it."""
        kept, message = self._messages.get(info.name, (None, None))
        if kept is not info:
            message = _info(info)
            if len(self._messages) >= _MOST_KEPT:
                self._messages.clear()
            self._messages[info.name] = (info, message)
        return message

    async def Usage(self, request: Any, context: Context) -> Any:  # noqa: N802
        usage = await _answer(context, "Usage", self._snapshotter.usage(request.key))
        return pb.UsageResponse(size=usage.size_bytes, inodes=usage.inodes)

    async def Cleanup(self, request: Any, context: Context) -> Any:  # noqa: N802
        await _answer(context, "Cleanup", self._snapshotter.cleanup())
        return Empty()


def register(service: SnapshotsService, server: grpc.aio.Server) -> None:
    """Add the service to a server that isn't started yet."""
    pb_grpc.add_SnapshotsServicer_to_server(service, server)


def namespace_of(context: Context, snapshot_key: str) -> str:
    """containerd's namespace of the call: told beside it, or by the head of the snapshot's key.

    Before 2.0 containerd told a proxy nothing; its keys are `namespace/sequence/client's key`.
    """
    for key, value in context.invocation_metadata() or ():
        if key == NAMESPACE_KEY and value:
            return str(value)
    head, _, rest = snapshot_key.partition("/")
    return head if head and rest.partition("/")[0].isdigit() else DEFAULT_NAMESPACE


async def _answer(context: Context, verb: str, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except Exception as error:
        code, message = status_of(error, verb)
    await context.abort(code, message)
    raise AssertionError("abort returned")


async def _next(blocks: AsyncIterator[list[Info]]) -> list[Info] | None:
    return await anext(blocks, None)


def _info(info: Info) -> Any:
    return pb.Info(
        name=info.name,
        parent=info.parent,
        kind=int(info.kind),
        created_at=_timestamp(info.created_ns),
        updated_at=_timestamp(info.updated_ns),
        labels=dict(info.labels),
    )


def _timestamp(time_ns: int) -> Timestamp:
    return Timestamp(seconds=time_ns // 1_000_000_000, nanos=time_ns % 1_000_000_000)


def _mounts(mounts: Sequence[Mount]) -> list[Any]:
    return [
        mount_pb2.Mount(type=mount.type, source=mount.source, options=mount.options)
        for mount in mounts
    ]
