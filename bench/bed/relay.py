"""A relay between the shaped link and a server: it adds delay and counts bytes.

Each piece of a stream is held for the delay and passed on in order; what is held is bounded by
HELD_BYTES for each direction, so that a slow reader slows the server down, as on a real path.
The counters live in a small mapped file: reading them costs the relay nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import uvloop

PIECE_BYTES = 256 * 1024
HELD_BYTES = 8 * 1024 * 1024
# A large send buffer would count bytes long before they are on the link.
SEND_BUFFER_BYTES = 256 * 1024
COUNTERS = struct.Struct("<QQQ")


class Counters:
    """``connections``, bytes ``up`` (to the server) and ``down`` (to clients), in a mapped file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(COUNTERS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), COUNTERS.size)

    def read(self) -> tuple[int, int, int]:
        """(connections, bytes up, bytes down) since the relay was started."""
        connections, up, down = COUNTERS.unpack(self._map[:])
        return connections, up, down

    def add(self, connections: int = 0, up: int = 0, down: int = 0) -> None:
        before = self.read()
        self._map[:] = COUNTERS.pack(before[0] + connections, before[1] + up, before[2] + down)

    def close(self) -> None:
        self._map.close()


async def pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    counters: Counters,
    *,
    delay_s: float,
    is_down: bool,
) -> None:
    """Pass one direction on until its end; each piece leaves ``delay_s`` after it came."""
    loop = asyncio.get_running_loop()
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD_BYTES // PIECE_BYTES)

    async def take() -> None:
        while True:
            data = await reader.read(PIECE_BYTES)
            await held.put((loop.time() + delay_s, data))
            if not data:
                return

    taking = loop.create_task(take())
    try:
        while True:
            due, data = await held.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            counters.add(**{"down" if is_down else "up": len(data)})
    finally:
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await taking


async def serve(
    listen: tuple[str, int],
    target: str,
    delay_s: float,
    counters: Counters,
    when_listening: Callable[[int], object] = lambda port: None,
) -> None:
    """Relay connections to ``listen`` to the unix socket ``target`` until cancelled."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counters.add(connections=1)
        writer.transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
        try:
            if delay_s:
                await asyncio.sleep(delay_s)
            server_reader, server_writer = await asyncio.open_unix_connection(target)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.create_task(
                pump(reader, server_writer, counters, delay_s=delay_s, is_down=False)
            ),
            asyncio.create_task(
                pump(server_reader, writer, counters, delay_s=delay_s, is_down=True)
            ),
        ]
        # A direction that breaks ends both; one that ends well leaves the other running.
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, server_writer):
            end.close()

    listener = socket.create_server(listen, backlog=1024)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    server = await asyncio.start_server(connected, sock=listener, limit=PIECE_BYTES)
    when_listening(listener.getsockname()[1])
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--target", required=True, help="path of the server's unix socket")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay of each direction")
    parser.add_argument("--counters", type=Path, required=True)
    arguments = parser.parse_args()
    host, port = arguments.listen.rsplit(":", 1)
    counters = Counters(arguments.counters)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve((host, int(port)), arguments.target, arguments.delay_ms / 1000, counters))


if __name__ == "__main__":
    main()
