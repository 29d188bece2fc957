"""An HTTP proxy for tests that tunnels (CONNECT) to one place, whatever it is asked for."""

from __future__ import annotations

import asyncio


class TunnelProxy:
    """Tunnels to port ``target`` of this machine; ``asked`` holds the heads of its requests."""

    def __init__(self, target: int, port: int = 0) -> None:
        self.asked: list[str] = []
        self.port = port
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def lead_to(self, target: int) -> None:
        """Tunnel to another port from now on."""
        self._target = target

    async def __aenter__(self) -> TunnelProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head.decode("latin-1"))
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writer.write(b"HTTP/1.1 200 Tunnel\r\n\r\n")
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
