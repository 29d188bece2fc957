"""The control service: the command line's face of the daemon, on the daemon's socket.

It only translates: what to do is in the object behind `Operations`, which the daemon builds.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import grpc

from snapshotter.rpc.pb.ember.control.v1 import control_pb2, control_pb2_grpc
from snapshotter.rpc.said import MARK
from snapshotter.rpc.status import status_of


@dataclass(frozen=True, slots=True)
class PullEvent:
    """A step of a pull; states as in control.proto."""

    state: str
    layer: int = 0
    total: int = 0
    digest: str = ""
    reason: str = ""
    percent: int = 0
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class WarmLayer:
    """How far one layer is; as in control.proto."""

    digest: str
    size_bytes: int
    done_bytes: int
    fetched_bytes: int
    state: str


@dataclass(frozen=True, slots=True)
class WarmState:
    """How far an image is."""

    digest: str
    layers: tuple[WarmLayer, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """What a removal did: bytes freed, what went, and what stayed and why."""

    freed_bytes: int
    removed: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainState:
    """How much of what is mounted is still missing.

    ``failed`` and ``waiting`` name views with the reason: given up, and nothing comes just now.
    """

    views_left: int
    bytes_left: int
    failed: tuple[str, ...]
    waiting: tuple[str, ...] = ()


class Operations(Protocol):
    """What an operator can ask of a daemon."""

    async def status(self) -> dict[str, Any]: ...

    def pull(self, image: str, namespace: str, platform: str) -> AsyncIterator[PullEvent]: ...

    def warm(self, image: str, platform: str) -> AsyncGenerator[WarmState, None]: ...

    async def remove(self, image: str, namespace: str, *, data_only: bool) -> Removal: ...

    def drain(self) -> AsyncIterator[DrainState]: ...


class ControlService(control_pb2_grpc.ControlServicer):  # type: ignore[misc]
    """Wire messages in and out of `Operations`."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def Status(  # noqa: N802
        self, request: control_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.StatusResponse:
        try:
            return control_pb2.StatusResponse(json=json.dumps(await self._operations.status()))
        except Exception as error:
            await context.abort(*status_of(error, "status"), MARK)

    async def Pull(  # noqa: N802
        self, request: control_pb2.PullRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[control_pb2.PullProgress]:
        try:
            async for event in self._operations.pull(
                request.image, request.namespace, request.platform
            ):
                yield control_pb2.PullProgress(
                    layer=event.layer,
                    total=event.total,
                    digest=event.digest,
                    state=event.state,
                    reason=event.reason,
                    percent=event.percent,
                    namespace=event.namespace,
                )
        except Exception as error:
            await context.abort(*status_of(error, "pull"), MARK)

    async def Warm(  # noqa: N802
        self, request: control_pb2.WarmRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[control_pb2.WarmProgress]:
        try:
            async with aclosing(self._operations.warm(request.image, request.platform)) as states:
                async for state in states:
                    yield control_pb2.WarmProgress(
                        digest=state.digest,
                        layers=[control_pb2.WarmLayer(**asdict(one)) for one in state.layers],
                        done=state.done,
                    )
        except Exception as error:
            await context.abort(*status_of(error, "warm"), MARK)

    async def Remove(  # noqa: N802
        self, request: control_pb2.RemoveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.RemoveResponse:
        try:
            removal = await self._operations.remove(
                request.image, request.namespace, data_only=request.data_only
            )
        except Exception as error:
            await context.abort(*status_of(error, "rm"), MARK)
        return control_pb2.RemoveResponse(
            freed_bytes=removal.freed_bytes, removed=removal.removed, kept=removal.kept
        )

    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[control_pb2.DrainProgress]:
        try:
            async for state in self._operations.drain():
                yield control_pb2.DrainProgress(
                    views_left=state.views_left,
                    bytes_left=state.bytes_left,
                    failed=state.failed,
                    waiting=state.waiting,
                )
        except Exception as error:
            await context.abort(*status_of(error, "drain"), MARK)


def register(service: ControlService, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    control_pb2_grpc.add_ControlServicer_to_server(service, server)
