"""What a client may do to the server: break the protocol, not read, leave, ask too much."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from snapshotter.rpc.http2 import frames
from snapshotter.rpc.http2.frames import Fault, Kind, Setting
from snapshotter.rpc.http2.stream import framed
from snapshotter.rpc.pb.ember.control.v1 import control_pb2 as pb
from snapshotter.rpc.pb.ember.control.v1 import control_pb2_grpc
from snapshotter.rpc.server import MAX_MESSAGE_BYTES, RpcServer
from tests.unit.rpc.raw_http2 import LIMIT_S, STATUS, Raw, Service, raw, serving, status_of


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def path(tmp_path: Path, service: Service) -> AsyncIterator[Path]:
    async with serving(tmp_path / "s", service) as made:
        yield made


BROKEN = {
    "too long a frame": (frames.frame(Kind.DATA, 0, 1, bytes(20_000)), Fault.FRAME_SIZE_ERROR),
    "data of no stream": (frames.frame(Kind.DATA, 0, 1, b"x"), Fault.PROTOCOL_ERROR),
    "an even stream": (frames.headers(2, b"\x82"), Fault.PROTOCOL_ERROR),
    "a push": (frames.frame(Kind.PUSH_PROMISE, 0, 1, bytes(4)), Fault.PROTOCOL_ERROR),
    "a block broken off": (
        frames.frame(Kind.HEADERS, 0, 1, b"\x82") + frames.frame(Kind.PING, 0, 0, bytes(8)),
        Fault.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": (
        frames.frame(Kind.CONTINUATION, frames.END_HEADERS, 1, b"\x82"),
        Fault.PROTOCOL_ERROR,
    ),
    "an index beyond the table": (frames.headers(1, b"\xff\xff\x7f"), Fault.COMPRESSION_ERROR),
    "padding beyond the frame": (
        frames.frame(Kind.HEADERS, frames.PADDED | frames.END_HEADERS, 1, b"\xff\x82"),
        Fault.PROTOCOL_ERROR,
    ),
    "half a setting": (frames.frame(Kind.SETTINGS, 0, 0, b"abc"), Fault.FRAME_SIZE_ERROR),
    "too wide a window": (
        frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**31)]),
        Fault.FLOW_CONTROL_ERROR,
    ),
    "a window that overflows": (frames.window_update(0, 2**31 - 1), Fault.FLOW_CONTROL_ERROR),
    "a window made wider by nothing": (frames.window_update(0, 0), Fault.PROTOCOL_ERROR),
    "a ping of two bytes": (frames.frame(Kind.PING, 0, 0, b"ab"), Fault.FRAME_SIZE_ERROR),
    "a window update of two bytes": (
        frames.frame(Kind.WINDOW_UPDATE, 0, 0, b"ab"),
        Fault.FRAME_SIZE_ERROR,
    ),
    "a block without an end": (
        frames.frame(Kind.HEADERS, 0, 1, bytes(16_000))
        + frames.frame(Kind.CONTINUATION, 0, 1, bytes(16_000)) * 4,
        Fault.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_who_breaks_the_protocol_is_told_why_and_others_are_served(
    path: Path, name: str
) -> None:
    broken, fault = BROKEN[name]
    async with raw(path) as client:
        client.send(broken)
        assert await client.fault() == fault
    assert await status_of(path) == "{}"


async def test_what_is_not_http2_is_sent_away(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await Raw(reader, writer).fault() == Fault.PROTOCOL_ERROR
    writer.close()
    assert await status_of(path) == "{}"


async def test_noise_ends_its_own_connection_at_most(path: Path) -> None:
    noise = random.Random(7)
    for _ in range(200):
        async with raw(path) as client:
            for _ in range(noise.randrange(1, 6)):
                payload = noise.randbytes(noise.randrange(40))
                kind, flags = noise.randrange(12), noise.randrange(256)
                whole = frames.frame(Kind.DATA, 0, noise.choice((0, 1, 3)), payload)
                client.send(whole[:3], bytes((kind, flags)), whole[5:])
            await client.writer.drain()
    assert await status_of(path) == "{}"


async def test_a_frame_may_come_byte_by_byte(path: Path) -> None:
    async with raw(path) as client:
        client.ask(1)
        flags, _, _ = await client.next(Kind.HEADERS)
        assert not flags & frames.END_STREAM
        block = frames.fields(((":method", "POST"), (":path", STATUS)))
        request = frames.headers(3, block) + frames.frame(
            Kind.DATA, frames.END_STREAM, 3, framed(b"")
        )
        for byte in request:
            client.send(bytes((byte,)))
            await client.writer.drain()
        assert (await client.next(Kind.DATA))[1] == 1
        assert (await client.next(Kind.DATA))[1] == 3


async def test_an_answer_waits_for_the_clients_window(path: Path, service: Service) -> None:
    service.document = "x" * 100_000
    async with raw(path, (Setting.INITIAL_WINDOW_SIZE, 1000)) as client:
        client.ask(1)
        got = (await client.next(Kind.DATA))[2]
        assert len(got) == 1000
        client.send(frames.frame(Kind.PING, 0, 0, bytes(8)))
        await client.next(Kind.PING)  # and no more data before it
        client.send(frames.window_update(1, 200_000), frames.window_update(0, 200_000))
        flags = 0
        while len(got) < 100_005:
            got += (await client.next(Kind.DATA))[2]
        flags, _, _ = await client.next(Kind.HEADERS)
        assert flags & frames.END_STREAM
        assert got.endswith(b"x" * 99_000)


async def test_a_stream_that_nobody_reads_is_not_piled_up(path: Path, service: Service) -> None:
    service.steps = 100_000
    async with raw(path) as client:
        client.ask(1, "/ember.control.v1.Control/Pull")
        await client.next(Kind.DATA)
        client.send(frames.frame(Kind.PING, 0, 0, bytes(8)))
        await client.next(Kind.PING)
        assert service.sent < 50
        client.send(frames.reset(1, Fault.CANCEL))
        await service.left.wait()


@pytest.mark.parametrize("how", ["reset", "hang up"])
async def test_who_leaves_is_not_worked_for(path: Path, service: Service, how: str) -> None:
    service.hold = True
    async with raw(path) as client:
        client.ask(1)
        await service.asked.wait()
        if how == "reset":
            client.send(frames.reset(1, Fault.CANCEL))
            await service.left.wait()
    await service.left.wait()
    service.hold = False
    assert await status_of(path) == "{}"


async def test_a_deadline_ends_a_call_on_the_server_too(path: Path, service: Service) -> None:
    service.hold = True
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await stub.Status(pb.StatusRequest(), timeout=0.2)
    await service.left.wait()


@pytest.mark.parametrize("image", ["", "refused"])
async def test_what_there_is_not_and_what_goes_wrong_have_codes(
    path: Path, caplog: pytest.LogCaptureFixture, image: str
) -> None:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        nothing = channel.unary_unary("/no.Service/Method", bytes, bytes)
        with pytest.raises(grpc.aio.AioRpcError, match=r"UNIMPLEMENTED[\s\S]*no method /no"):
            await nothing(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.ControlStub(channel).Remove(
                pb.RemoveRequest(image=image), timeout=10
            )
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert "secret" not in str(caught.value.details())
    assert "a secret" in caplog.text


@pytest.mark.parametrize("timeout", ["9" * 400 + "S", "-1S", "S", "12", "\xb2S", "99999999H"])
async def test_a_deadline_that_is_none_is_not_kept(path: Path, timeout: str) -> None:
    async with raw(path) as client:
        client.ask(1, timeout=timeout)
        assert (await client.next(Kind.DATA))[1] == 1


async def test_long_requests_that_never_end_are_bounded_together(path: Path) -> None:
    part = b"\0" + MAX_MESSAGE_BYTES.to_bytes(4, "big") + bytes(frames.MOST_FRAME_BYTES - 5)
    async with raw(path) as client:
        for stream in range(1, 13, 2):
            block = frames.fields(((":method", "POST"), (":path", STATUS)))
            client.send(frames.headers(stream, block))
            for _ in range(MAX_MESSAGE_BYTES // len(part) - 1):
                client.send(frames.frame(Kind.DATA, 0, stream, part))
                await client.writer.drain()
        flags, stream, _ = await client.next(Kind.HEADERS)
        assert (stream, flags & frames.END_STREAM) == (9, frames.END_STREAM)
        assert await status_of(path) == "{}"


async def test_connections_are_bounded_and_so_is_what_is_said_of_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_ones = [await asyncio.open_unix_connection(path) for _ in range(1024)]
    for _ in range(20):
        reader, writer = await asyncio.open_unix_connection(path)
        assert await Raw(reader, writer).fault() == Fault.ENHANCE_YOUR_CALM
        writer.close()
    assert 1 <= caplog.text.count("too many connections") < 20
    for _, each in open_ones:
        each.close()
    assert await status_of(path) == "{}"


async def test_a_call_without_or_with_two_requests_is_refused(path: Path) -> None:
    async with raw(path) as client:
        client.ask(1, end=False)
        client.send(frames.frame(Kind.DATA, 0, 1, framed(b"")))
        flags, stream, _ = await client.next(Kind.HEADERS)
        assert (stream, flags & frames.END_STREAM) == (1, frames.END_STREAM)
        block = frames.fields(((":method", "POST"), (":path", STATUS)))
        client.send(frames.headers(3, block, frames.END_STREAM))
        flags, stream, _ = await client.next(Kind.HEADERS)
        assert (stream, flags & frames.END_STREAM) == (3, frames.END_STREAM)


async def test_a_stop_lets_calls_end_and_takes_no_new_ones(
    tmp_path: Path, service: Service
) -> None:
    service.document = "y" * 200_000
    server = RpcServer(
        tmp_path / "t", [lambda s: control_pb2_grpc.add_ControlServicer_to_server(service, s)]
    )
    await server.start()
    async with asyncio.timeout(LIMIT_S), raw(tmp_path / "t") as client:
        client.ask(1)
        await client.next(Kind.DATA)
        stopping = asyncio.create_task(server.stop(10.0))
        _, _, payload = await client.next(Kind.GOAWAY)
        assert payload == bytes((0, 0, 0, 1, 0, 0, 0, 0))
        client.ask(3)
        assert (await client.next(Kind.RST_STREAM))[1] == 3
        client.send(frames.window_update(1, 200_000), frames.window_update(0, 200_000))
        assert (await client.next(Kind.HEADERS))[0] & frames.END_STREAM
        await stopping
        assert await client.reader.read() == b""


async def test_who_asks_much_and_reads_nothing_is_not_read_on(path: Path) -> None:
    """Answers pile up in the socket and no further; who reads at last gets every one of them."""
    pings = 100_000
    async with raw(path) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(*(frames.frame(Kind.PING, 0, 0, n.to_bytes(8, "big")) for n in range(pings)))
        assert await status_of(path) == "{}"
        assert client.writer.transport.get_write_buffer_size() > 0
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number in range(pings):
            _, _, payload = await client.next(Kind.PING)
            assert int.from_bytes(payload, "big") == number
