"""The channel to containerd: against grpcio's server, and against one that behaves as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.channel import EOF, NO_CONNECTION, Call, Channel
from snapshotter.rpc.http2.frames import Fault, Kind
from snapshotter.rpc.http2.stream import framed
from tests.fakes.upstream import Upstream, fail, reply

pytestmark = pytest.mark.timeout(20)
MOST_BYTES = 16 << 20
METHOD = "/some.Service/Method"


def same(message: bytes) -> bytes:
    return message


def ask(channel: Channel, request: bytes = b"hello", timeout_s: float | None = None) -> Call:
    return channel.unary_unary(METHOD, same, same)(
        request, timeout=timeout_s, metadata=(("containerd-namespace", "k8s.io"),)
    )


def stream(channel: Channel) -> Call:
    return channel.stream_stream(METHOD, same, same)()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


@pytest.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[Upstream]:
    async with Upstream(tmp_path / "s") as made:
        yield made


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[Channel]:
    made = Channel(tmp_path / "s", MOST_BYTES)
    yield made
    await made.close()


async def test_a_call_carries_its_request_and_what_stands_beside_it(
    upstream: Upstream, channel: Channel
) -> None:
    assert await ask(channel, timeout_s=10) == b"hello"
    call = upstream.calls[0]
    assert (call.method, call.requests) == (METHOD, [b"hello"])
    assert call.metadata["containerd-namespace"] == "k8s.io"
    assert call.time_left_s is not None and 5 < call.time_left_s <= 10


async def test_many_calls_share_one_connection(upstream: Upstream, channel: Channel) -> None:
    answers = await asyncio.gather(*(ask(channel, b"%d" % n) for n in range(300)))
    assert answers == [b"%d" % n for n in range(300)]


async def test_messages_far_beyond_a_window_go_both_ways(
    upstream: Upstream, channel: Channel
) -> None:
    call = stream(channel)
    for n in range(4):
        message = bytes((n,)) * (3 << 20)
        await call.write(message)
        assert await call.read() == message
    await call.done_writing()
    assert await call.read() is EOF
    assert await ask(channel, b"x" * (3 << 20)) == b"x" * (3 << 20)


async def test_what_is_not_read_is_not_sent(upstream: Upstream, channel: Channel) -> None:
    sent = 0

    async def flood(requests: Any, context: Any) -> None:
        nonlocal sent
        for _ in range(1000):
            await context.write(bytes(100_000))
            sent += 1

    upstream.answers[METHOD] = flood
    call = channel.unary_stream(METHOD, same, same)(b"")
    assert len(await call.read()) == 100_000
    other = channel.unary_unary("/some.Service/Other", same, same)
    for _ in range(20):
        assert await other(b"still answered") == b"still answered"
    assert sent < 100
    call.cancel()
    await upstream.calls[0].ended.wait()


async def test_a_failure_has_its_code_its_words_and_its_metadata(
    upstream: Upstream, channel: Channel
) -> None:
    words = "layer é 100% gone\n"
    upstream.answers[METHOD] = fail(grpc.StatusCode.NOT_FOUND, words, ("why", "so"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(channel)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, words)
    trailing: Any = caught.value.trailing_metadata()
    assert dict(trailing) == {"why": "so"}


async def test_an_answer_must_be_one(upstream: Upstream, channel: Channel) -> None:
    upstream.answers[METHOD] = reply()
    assert (await refused(ask(channel)))[0] is grpc.StatusCode.INTERNAL
    upstream.answers[METHOD] = reply(b"1", b"2")
    assert (await refused(ask(channel)))[0] is grpc.StatusCode.INTERNAL
    upstream.answers[METHOD] = reply(bytes(MOST_BYTES + 1))
    assert (await refused(ask(channel)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("how", ["deadline", "cancelled", "cancel"])
async def test_a_call_that_is_given_up_ends_at_the_other_side_too(
    upstream: Upstream, channel: Channel, how: str
) -> None:
    async def stuck(requests: Any, context: Any) -> None:
        await asyncio.Event().wait()

    upstream.answers[METHOD] = stuck
    call = ask(channel, timeout_s=0.2 if how == "deadline" else None)
    waiting = asyncio.ensure_future(call)
    await upstream.arrived.wait()
    if how == "cancelled":
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        if how == "cancel":
            call.cancel()
        code, words = await refused(waiting)
        expected = grpc.StatusCode.CANCELLED, "the call was cancelled"
        if how == "deadline":
            expected = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
        assert (code, words) == expected
    await upstream.calls[0].ended.wait()


async def test_nobody_there_is_said_at_once_and_found_later(
    tmp_path: Path, channel: Channel
) -> None:
    code, words = await refused(ask(channel))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert words.startswith(NO_CONNECTION)
    assert words.endswith(": No such file or directory")
    for _ in range(2):
        async with Upstream(tmp_path / "s"):
            assert await ask(channel) == b"hello"


Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def odd_server(path: Path, *answers: bytes) -> AsyncIterator[None]:
    """Answers the first frames of a client with ``answers``, and hangs up at the last."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(frames.PREFACE)
        await reader.readuntil(framed(b"hello"))
        writer.write(b"".join(answers))
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()


SETTINGS = frames.settings(())
HEADERS = frames.headers(1, frames.fields(((":status", "200"),)))
ODD = {
    "hangs up": ((), grpc.StatusCode.UNAVAILABLE),
    "hangs up in an answer": ((SETTINGS, HEADERS), grpc.StatusCode.UNAVAILABLE),
    "leaves": ((SETTINGS, frames.goaway(0, Fault.NO_ERROR)), grpc.StatusCode.UNAVAILABLE),
    "refuses": (
        (SETTINGS, frames.reset(1, Fault.REFUSED_STREAM)),
        grpc.StatusCode.UNAVAILABLE,
    ),
    "is no gRPC": (
        (SETTINGS, frames.headers(1, frames.fields(((":status", "404"),)))),
        grpc.StatusCode.UNKNOWN,
    ),
    "has no status": (
        (SETTINGS, HEADERS, frames.headers(1, frames.fields((("a", "b"),)), frames.END_STREAM)),
        grpc.StatusCode.UNKNOWN,
    ),
    "ends without a status": (
        (SETTINGS, HEADERS, frames.frame(Kind.DATA, frames.END_STREAM, 1)),
        grpc.StatusCode.INTERNAL,
    ),
    "compresses": (
        (SETTINGS, HEADERS, frames.frame(Kind.DATA, 0, 1, b"\1\0\0\0\0")),
        grpc.StatusCode.INTERNAL,
    ),
    "is not HTTP/2": ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), grpc.StatusCode.UNAVAILABLE),
}


@pytest.mark.parametrize("name", ODD)
async def test_a_server_that_does_as_it_likes_fails_its_calls(
    tmp_path: Path, channel: Channel, name: str
) -> None:
    answers, code = ODD[name]
    async with odd_server(tmp_path / "s", *answers):
        assert (await refused(ask(channel)))[0] is code


async def test_a_closed_channel_fails_what_is_under_way(
    upstream: Upstream, channel: Channel
) -> None:
    async def stuck(requests: Any, context: Any) -> None:
        await asyncio.Event().wait()

    upstream.answers[METHOD] = stuck
    call = asyncio.ensure_future(ask(channel))
    await upstream.arrived.wait()
    await channel.close()
    assert (await refused(call))[0] is grpc.StatusCode.UNAVAILABLE
