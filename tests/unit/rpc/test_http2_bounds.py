"""What holds while both sides may send: windows that change, long header blocks, long messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import hpack
import pytest

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.channel import Channel
from snapshotter.rpc.http2.frames import Fault, Kind, Setting
from snapshotter.rpc.http2.stream import STREAM_WINDOW, framed
from snapshotter.rpc.server import MAX_MESSAGE_BYTES
from tests.unit.rpc.raw_http2 import LIMIT_S, STATUS, Raw, Service, raw, serving, status_of

MOST = frames.MOST_WINDOW


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def path(tmp_path: Path, service: Service) -> AsyncIterator[Path]:
    async with serving(tmp_path / "s", service) as made:
        yield made


async def answer(client: Raw) -> bytes:
    """The next answer, up to its trailers."""
    await client.next(Kind.HEADERS)
    got = b""
    while True:
        flags, kind, payload = await client.either(Kind.DATA, Kind.HEADERS)
        if kind == Kind.HEADERS:
            assert flags & frames.END_STREAM
            return got
        got += payload


async def silence(client: Raw) -> None:
    """Nothing but the answer to a ping comes."""
    client.send(frames.frame(Kind.PING, 0, 0, b"anything"))
    assert (await client.either(Kind.DATA, Kind.PING))[1] == Kind.PING


async def test_a_window_that_shrinks_in_mid_stream_may_fall_below_nothing(
    path: Path, service: Service
) -> None:
    service.document = "x" * 5000
    async with raw(path, (Setting.INITIAL_WINDOW_SIZE, 1000)) as client:
        client.ask(1)
        assert len((await client.next(Kind.DATA))[2]) == 1000
        client.send(frames.settings([(Setting.INITIAL_WINDOW_SIZE, 100)]))  # now it is -900
        client.send(frames.window_update(1, 900))
        await silence(client)
        client.send(frames.window_update(1, 1))
        assert len((await client.next(Kind.DATA))[2]) == 1
        client.send(frames.settings([(Setting.INITIAL_WINDOW_SIZE, 200)]))
        assert len((await client.next(Kind.DATA))[2]) == 100
        client.send(frames.settings([(Setting.INITIAL_WINDOW_SIZE, 60_000)]))
        got = 1101
        while got < len(service.document) + 5:
            got += len((await client.next(Kind.DATA))[2])
        assert (await client.next(Kind.HEADERS))[0] & frames.END_STREAM


@pytest.mark.parametrize("how", ["by an update", "by a setting"])
async def test_a_streams_window_that_overflows_ends_the_connection(
    path: Path, service: Service, how: str
) -> None:
    service.hold = True
    async with raw(path) as client:
        client.ask(1)
        await service.asked.wait()
        client.send(frames.window_update(1, MOST - frames.USUAL_WINDOW))
        await silence(client)
        if how == "by an update":
            client.send(frames.window_update(1, 1))
        else:
            client.send(frames.settings([(Setting.INITIAL_WINDOW_SIZE, frames.USUAL_WINDOW + 1)]))
        assert await client.fault() == Fault.FLOW_CONTROL_ERROR
    service.hold = False
    assert await status_of(path) == "{}"


async def test_a_header_block_may_come_in_parts(path: Path) -> None:
    long = [(f"name-{number}", "v" * 4000) for number in range(8)]
    block = frames.fields([(":method", "POST"), (":path", STATUS), *long])
    assert len(block) > frames.MOST_FRAME_BYTES
    async with raw(path) as client:
        client.send(frames.headers(1, block))
        client.send(frames.frame(Kind.DATA, frames.END_STREAM, 1, framed(b"")))
        assert (await answer(client))[5:] == b"\n\x02{}"


async def test_what_a_client_sends_behind_its_request_ends_it(path: Path) -> None:
    async with raw(path) as client:
        client.ask(1, end=False)
        client.send(frames.headers(1, frames.fields([("more", "said")]), frames.END_STREAM))
        assert (await answer(client))[5:] == b"\n\x02{}"


def field(name: bytes, value: bytes, first: int = 0) -> bytes:
    """A header field; ``first`` 0x40: to be remembered as the newest."""
    return bytes((first, len(name))) + name + bytes((len(value),)) + value


async def test_a_table_whose_bound_changes_is_that_of_the_client(path: Path) -> None:
    """Blocks that say the same mean the same only while the table is what it was."""
    call = field(b":path", STATUS.encode())
    large, small = b"\x3f\xe1\x1f" + call, b"\x20" + call
    remembered = call + field(b"some", b"thing", 0x40)
    known = call + b"\xbe"  # the newest entry
    async with raw(path) as client:
        for number, block in enumerate((large, small, large, remembered, known)):
            client.send(frames.headers(2 * number + 1, block))
            client.send(frames.frame(Kind.DATA, frames.END_STREAM, 2 * number + 1, framed(b"")))
            assert (await answer(client))[5:] == b"\n\x02{}"


async def test_a_table_that_is_used_is_understood(path: Path) -> None:
    encoder = hpack.Encoder()
    async with raw(path) as client:
        for number in range(50):
            if number % 10 == 9:
                encoder.header_table_size = 4096 if number % 20 == 9 else 60
            pairs = [(":method", "POST"), (":path", STATUS), ("n", str(number % 7))]
            client.send(frames.headers(2 * number + 1, encoder.encode(pairs)))
            client.send(frames.frame(Kind.DATA, frames.END_STREAM, 2 * number + 1, framed(b"")))
            assert (await answer(client))[5:] == b"\n\x02{}"


LONG = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\0" + LONG, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\1\0\0\0\2ab", grpc.StatusCode.UNIMPLEMENTED),
    ],
    ids=["too long", "compressed"],
)
async def test_a_message_that_is_not_taken_is_refused_before_it_has_come(
    path: Path, message: bytes, code: grpc.StatusCode
) -> None:
    async with raw(path) as client:
        client.send(frames.headers(1, frames.fields([(":path", STATUS)])))
        client.send(frames.frame(Kind.DATA, 0, 1, message))
        flags, _, block = await client.next(Kind.HEADERS)
        said = dict(hpack.Decoder().decode(block, raw=True))
        assert flags & frames.END_STREAM
        assert said[b"grpc-status"] == str(code.value[0]).encode()
        _, stream, payload = await client.next(Kind.RST_STREAM)
        assert (stream, int.from_bytes(payload, "big")) == (1, Fault.NO_ERROR)
        client.send(frames.frame(Kind.DATA, 0, 1, bytes(10_000)))  # was on its way
        client.ask(3)
        assert (await answer(client))[5:] == b"\n\x02{}"


async def test_a_server_that_sends_beyond_our_window_is_left(tmp_path: Path) -> None:
    """One that minds no window could fill our memory."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(framed(b"hello"))
        writer.write(frames.settings(()) + frames.headers(1, frames.fields([(":status", "200")])))
        piece = frames.frame(Kind.DATA, 0, 1, framed(bytes(10_000)))
        writer.write(piece * (2 * STREAM_WINDOW // 10_000))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    channel = Channel(tmp_path / "s", MAX_MESSAGE_BYTES)
    async with asyncio.timeout(LIMIT_S):
        call = channel.unary_stream("/some.Service/Method", bytes, bytes)(b"hello")
        await gone.wait()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            async for message in call:
                assert len(message) == 10_000
    await channel.close()
    server.close()


@pytest.mark.parametrize("ends", ["by its answer", "by a cancel"])
async def test_a_connection_that_takes_no_more_calls_is_closed_after_the_last(
    tmp_path: Path, ends: str
) -> None:
    left, asked = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(framed(b"hello"))
        writer.write(frames.settings(()) + frames.goaway(1, Fault.NO_ERROR))
        if ends == "by its answer":
            writer.write(frames.headers(1, frames.fields([(":status", "200")])))
            writer.write(frames.frame(Kind.DATA, 0, 1, framed(b"hi")))
            trailers = frames.fields([("grpc-status", "0")])
            writer.write(frames.headers(1, trailers, frames.END_STREAM))
        asked.set()
        await reader.read()
        left.set()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    channel = Channel(tmp_path / "s", MAX_MESSAGE_BYTES)
    async with asyncio.timeout(LIMIT_S):
        call = channel.unary_unary("/some.Service/Method", bytes, bytes)(b"hello")
        if ends == "by its answer":
            assert await call == b"hi"
        else:
            await asked.wait()
            call.cancel()
        await left.wait()
    await channel.close()
    server.close()


async def test_who_stops_reading_a_stream_of_answers_ends_the_call(
    path: Path, service: Service
) -> None:
    service.steps = 100_000
    channel = Channel(path, MAX_MESSAGE_BYTES)
    answers = channel.unary_stream("/ember.control.v1.Control/Pull", bytes, bytes)(b"")
    reading = answers.__aiter__()
    async with asyncio.timeout(LIMIT_S):
        assert await anext(reading)
        await reading.aclose()  # type: ignore[attr-defined]
        await service.left.wait()
    assert service.sent < 1000
    await channel.close()
