"""A gRPC server on a unix socket that answers any method as a test says, and notes what came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

Answer = Callable[[Any, Any], Awaitable[None]]


@dataclass
class Call:
    """One call as it came. ``ended`` is set when its handler is left, however that happens."""

    method: str
    metadata: dict[str, str | bytes]
    time_left_s: float | None
    requests: list[bytes] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Upstream:
    """Entered, it listens on ``path``. ``answers`` maps a method to what writes its answer; a
    method without one echoes its requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[Call] = []
        self.answers: dict[str, Answer] = {}
        self.arrived = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Upstream:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_AnyMethod(self),))
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def serve(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        call = Call(method, dict(context.invocation_metadata()), context.time_remaining())
        answer: Answer = self.answers.get(method, echo)
        self.calls.append(call)
        self.arrived.set()

        async def noted() -> AsyncIterator[bytes]:
            async for message in requests:
                call.requests.append(message)
                yield message

        try:
            await answer(noted(), context)
        finally:
            call.ended.set()


async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for message in requests:
        await context.write(message)


def reply(*messages: bytes) -> Answer:
    """An answer that reads all requests and then sends ``messages``."""

    async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            pass
        for message in messages:
            await context.write(message)

    return answer


def fail(code: grpc.StatusCode, words: str, *trailing: tuple[str, str | bytes]) -> Answer:
    """An answer that reads all requests and then fails."""

    async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            pass
        await context.abort(code, words, trailing)

    return answer


class _AnyMethod(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._upstream.serve(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(serve)
