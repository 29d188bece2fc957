"""A server with a service that does as a test says, and a client that sends frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.frames import Kind, Setting
from snapshotter.rpc.http2.stream import framed
from snapshotter.rpc.pb.ember.control.v1 import control_pb2 as pb
from snapshotter.rpc.pb.ember.control.v1 import control_pb2_grpc
from snapshotter.rpc.server import RpcServer

STATUS = "/ember.control.v1.Control/Status"
LIMIT_S = 20.0


class Service(control_pb2_grpc.ControlServicer):  # type: ignore[misc]
    """Answers Status with a document of a length, Pull with as many steps as are allowed."""

    def __init__(self) -> None:
        self.document = "{}"
        self.steps = 0
        self.sent = 0
        self.hold = False
        self.asked = asyncio.Event()
        self.left = asyncio.Event()

    async def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.set()
        if self.hold:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        return pb.StatusResponse(json=self.document)

    async def Pull(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            for _ in range(self.steps):
                yield pb.PullProgress(reason="x" * 10_000)
                self.sent += 1
        finally:
            self.left.set()

    async def Remove(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind = ConnectionRefusedError if request.image == "refused" else ValueError
        raise kind("a secret")


class Raw:
    """A client that sends what a test says, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    def ask(
        self, stream: int, path: str = STATUS, *, end: bool = True, timeout: str = "9S"
    ) -> None:
        head = ((":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers"))
        block = frames.fields((*head, ("grpc-timeout", timeout)))
        self.send(frames.headers(stream, block))
        flags = frames.END_STREAM if end else 0
        self.send(frames.frame(Kind.DATA, flags, stream, framed(b"")))

    async def next(self, *wanted: Kind) -> tuple[int, int, bytes]:
        """(flags, stream, payload) of the next frame of a wanted kind."""
        flags, _, stream, payload = await self._next(wanted)
        return flags, stream, payload

    async def either(self, *wanted: Kind) -> tuple[int, int, bytes]:
        """(flags, kind, payload) of the next frame of a wanted kind."""
        flags, kind, _, payload = await self._next(wanted)
        return flags, kind, payload

    async def _next(self, wanted: tuple[Kind, ...]) -> tuple[int, int, int, bytes]:
        while True:
            raw = await self.reader.readexactly(frames.HEAD_BYTES)
            length, kind, flags, stream = frames.head(raw)
            payload = await self.reader.readexactly(length)
            if kind in wanted:
                return flags, kind, stream, payload

    async def fault(self) -> int:
        """Why the server ends the connection; reads up to its end."""
        _, _, payload = await self.next(Kind.GOAWAY)
        assert await self.reader.read() == b""
        return int.from_bytes(payload[4:8], "big")


@asynccontextmanager
async def serving(path: Path, service: Service) -> AsyncIterator[Path]:
    """``service`` on the socket ``path``."""
    server = RpcServer(path, [lambda s: control_pb2_grpc.add_ControlServicer_to_server(service, s)])
    await server.start()
    yield path
    await server.stop(0.1)


@asynccontextmanager
async def raw(path: Path, *settings: tuple[Setting, int]) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        client = Raw(reader, writer)
        client.send(frames.PREFACE, frames.settings(settings))
        async with asyncio.timeout(LIMIT_S):
            yield client
    finally:
        writer.close()


async def status_of(path: Path) -> str:
    """What a sound client gets, by grpcio's own implementation."""
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        answer = await control_pb2_grpc.ControlStub(channel).Status(pb.StatusRequest(), timeout=10)
    return str(answer.json)
