"""The relay passes streams on whole, late by its delay, counted, and ends with its ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from bench.bed.relay import Counters, serve

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Connect = Callable[[Handler, float], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
def counters(tmp_path: Path) -> Counters:
    return Counters(tmp_path / "counters")


@pytest.fixture
async def connect(tmp_path: Path, counters: Counters) -> AsyncIterator[Connect]:
    """Start a server with a handler and a relay before it; a connection through both."""
    tasks: list[asyncio.Task[None]] = []

    async def start(
        handler: Handler, delay_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = str(tmp_path / "server.sock")
        await asyncio.start_unix_server(handler, target)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        relay = serve(("127.0.0.1", 0), target, delay_s, counters, listening.set_result)
        tasks.append(asyncio.create_task(relay))
        return await asyncio.open_connection("127.0.0.1", await listening)

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100_000):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_what_goes_in_comes_out_and_is_counted(connect: Connect, counters: Counters) -> None:
    reader, writer = await connect(echo, 0.0)
    sent = os.urandom(3_000_000)

    async def send() -> None:
        writer.write(sent)
        await writer.drain()
        writer.write_eof()

    _, came = await asyncio.gather(send(), reader.read(-1))
    assert came == sent
    assert counters.read() == (1, len(sent), len(sent))


async def test_an_answer_is_late_by_the_delay_of_both_ways(connect: Connect) -> None:
    reader, writer = await connect(echo, 0.03)
    loop = asyncio.get_running_loop()
    start = loop.time()
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"
    first_s = loop.time() - start
    start = loop.time()
    writer.write(b"pong")
    assert await reader.readexactly(4) == b"pong"
    # The first waits for the connection to the server too.
    assert first_s >= 0.09
    assert loop.time() - start >= 0.06


async def test_a_server_that_hangs_up_is_seen_as_such(connect: Connect) -> None:
    async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half")
        writer.close()

    reader, _ = await connect(slam, 0.0)
    assert await asyncio.wait_for(reader.read(-1), 5) == b"half"


class Flood:
    """A server that writes until it is stopped by the other side."""

    def __init__(self) -> None:
        self.written = 0
        self.ended = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(1_000_000))
                await writer.drain()
                self.written += 1_000_000
        except OSError:
            self.ended.set()

    async def settle(self) -> None:
        """Wait until nothing moves any more."""
        before = -1
        while self.written != before:
            before = self.written
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), 0.3)


async def test_a_reader_that_does_not_read_holds_the_server_back(connect: Connect) -> None:
    flood = Flood()
    ends = await connect(flood, 0.0)
    await flood.settle()
    assert 0 < flood.written < 40_000_000
    ends[1].transport.abort()


async def test_a_client_that_goes_away_ends_the_servers_work(
    connect: Connect, counters: Counters
) -> None:
    flood = Flood()
    _, writer = await connect(flood, 0.0)
    await flood.settle()
    writer.transport.abort()
    await asyncio.wait_for(flood.ended.wait(), 5)
    assert counters.read()[2] <= flood.written
