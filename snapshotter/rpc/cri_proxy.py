"""The CRI image service, passed on to containerd so that Ember sees the credentials of pulls.

Every call of every service goes through as the bytes that came, streams, metadata, deadlines,
status details and cancellation included; only PullImage and RemoveImage are looked at. The
kubelet points its image service endpoint at this proxy's socket.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.rpc.cri_pulls import Pull, PullSchool
from snapshotter.rpc.http2.channel import NO_CONNECTION
from snapshotter.rpc.server import MAX_MESSAGE_BYTES

_PULL = re.compile(r"/runtime\.v1(alpha2)?\.ImageService/PullImage")
_REMOVE = re.compile(r"/runtime\.v1(alpha2)?\.ImageService/RemoveImage")
_OWN_METADATA = frozenset({"user-agent", "content-type", "te"})
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 3000),
)

_HALF_CLOSE_S = 0.05
"""The end of a unary call's requests comes with the request; whatever else is a stream."""

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Messages = AsyncIterator[bytes]
_Watch = Callable[[AsyncIterable[bytes]], AsyncIterable[bytes]]


class CriProxy:
    """Registers with a server (`RpcServer` gives it its socket); `close` it after the server."""

    def __init__(self, upstream: Path, pulls: PullCredentials) -> None:
        self._upstream = upstream
        self._school = PullSchool(pulls)
        self._channel: grpc.aio.Channel | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Answer every method that nothing else on this server answers."""
        self._channel = grpc.aio.insecure_channel(
            f"unix:{self._upstream}", options=_CHANNEL_OPTIONS
        )
        server.add_generic_rpc_handlers((_Everything(self),))

    async def close(self) -> None:
        """Cut the connection to containerd."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def serve(self, method: str, requests: _Messages, context: _Context) -> None:
        """Pass one call on, whatever it is: on the wire a unary call is a stream of one."""
        if _PULL.fullmatch(method):
            await self._pull(method, requests, context)
        elif _REMOVE.fullmatch(method):
            seen: list[bytes] = []
            await self._forward(method, _watched(requests, seen.append), context, _unwatched)
            for message in seen[:1]:
                self._school.removed(message)
        else:
            await self._forward(method, requests, context, _unwatched)

    async def _pull(self, method: str, requests: _Messages, context: _Context) -> None:
        pulls: list[Pull] = []
        answers: list[bytes] = []

        def begins(message: bytes) -> None:
            pull = self._school.pull_begins(message)
            if pull is not None:
                pulls.append(pull)

        done = False
        try:
            await self._forward(
                method,
                _watched(requests, begins),
                context,
                lambda messages: _watched(messages, answers.append),
            )
            done = True
        finally:
            for pull in pulls:
                self._school.pull_ends(pull, answers[0] if done and answers else None)

    async def _forward(
        self, method: str, requests: _Messages, context: _Context, watch: _Watch
    ) -> None:
        """Both directions at once. Raises (by aborting) if the call did not end well."""
        if self._channel is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the CRI proxy is stopping")
        call = await self._begin(self._channel, method, requests, context)
        try:
            await context.send_initial_metadata(_carried(await call.initial_metadata()))
            async for message in watch(call):
                await context.write(message)
            context.set_trailing_metadata(_carried(await call.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            trailing = _carried(error.trailing_metadata())
            await context.abort(error.code(), self._explain(error), trailing)
        finally:
            call.cancel()

    async def _begin(
        self, channel: grpc.aio.Channel, method: str, requests: _Messages, context: _Context
    ) -> Any:
        """Call containerd; with a single request, as nearly all have, in one go.

        Where an answer comes before the requests were read (a method that is not known there), a
        stream that is still being written to would end with gRPC's own error in its place, and
        the kubelet goes by the true one.
        """
        options: dict[str, Any] = {"metadata": _carried(context.invocation_metadata())}
        first = await anext(requests, None)
        if first is None:
            stream = _joined((), requests)
        else:
            second = asyncio.ensure_future(_next(requests))
            second.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.wait({second}, timeout=_HALF_CLOSE_S)
            if second.done() and second.result() is None:
                alone = channel.unary_stream(method, None, None)
                return alone(first, timeout=context.time_remaining(), **options)
            stream = _joined((first,), requests, second)
        many = channel.stream_stream(method, None, None)
        return many(stream, timeout=context.time_remaining(), **options)

    def _explain(self, error: grpc.aio.AioRpcError) -> str:
        """containerd's own words; where it is not there, which socket that is."""
        words = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and words.startswith(NO_CONNECTION):
            return f"containerd does not answer on {self._upstream} ({words[:200]})"
        return words


class _Everything(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Has a handler for any method name: raw bytes, streams both ways."""

    def __init__(self, proxy: CriProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def serve(requests: _Messages, context: _Context) -> None:
            await self._proxy.serve(method, requests, context)

        handler: Any = serve
        return grpc.stream_stream_rpc_method_handler(handler)


async def _next(messages: _Messages) -> bytes | None:
    return await anext(messages, None)


async def _joined(
    first: Iterable[bytes],
    messages: AsyncIterable[bytes],
    second: asyncio.Future[bytes | None] | None = None,
) -> _Messages:
    for message in first:
        yield message
    if second is not None:
        following = await second
        if following is None:
            return
        yield following
    async for message in messages:
        yield message


async def _watched(messages: AsyncIterable[bytes], see: Callable[[bytes], None]) -> _Messages:
    async for message in messages:
        see(message)
        yield message


def _unwatched(messages: AsyncIterable[bytes]) -> AsyncIterable[bytes]:
    return messages


def _carried(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """The caller's metadata without what belongs to each connection of its own."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key not in _OWN_METADATA
        and not key.startswith(":")
        and (not key.startswith("grpc-") or key == "grpc-status-details-bin")
    )
