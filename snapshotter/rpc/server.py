"""The gRPC server on its unix socket: limits, the socket's life, a clean stop.

A socket that nobody answers is left over from a killed process and is replaced; one that answers
belongs to another daemon and is not touched. Calls are served on the event loop's own thread
(rpc/http2); what has to pass streams of requests on is served by grpcio.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from snapshotter.errors import ConfigError, FailedPreconditionError, UnavailableError
from snapshotter.rpc.http2.server import LoopServer

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""containerd's own limit on a proxy connection, both ways."""
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""The status document grows with the images of a node; containerd gets its lists in blocks."""
MAX_CALLS: Final = 4096
_PROBE_S: Final = 2.0
_MAX_PATH_BYTES: Final = 107

Registration = Callable[[Any], None]
"""Adds a service by grpcio's generated code, or a generic handler to grpcio's own server."""


class RpcServer:
    """``await start()`` binds and serves; ``await stop()`` lets calls under way finish.

    ``generic``: by grpcio, which takes handlers for whatever method is called.
    """

    def __init__(
        self, path: Path, registrations: Sequence[Registration], *, generic: bool = False
    ) -> None:
        self._path = path
        self._registrations = registrations
        self._generic = generic
        self._server: LoopServer | grpc.aio.Server | None = None

    async def start(self) -> None:
        """FailedPreconditionError if another daemon answers on the socket."""
        if len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"socket path {self._path} is longer than {_MAX_PATH_BYTES} bytes")
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        await asyncio.to_thread(_make_way, self._path)
        # Bound under a name of our own and renamed: it never exists with open permissions.
        hidden = self._path.with_name(f".{os.getpid()}-{secrets.token_hex(3)}")
        hidden.unlink(missing_ok=True)
        try:
            server = await (self._start_grpcio(hidden) if self._generic else self._start(hidden))
        except (OSError, RuntimeError):
            raise UnavailableError(
                f"cannot listen on {self._path}; is its directory writable?"
            ) from None
        hidden.chmod(0o600)
        hidden.rename(self._path)
        self._server = server

    async def _start(self, path: Path) -> LoopServer:
        server = LoopServer(most_message_bytes=MAX_MESSAGE_BYTES, most_calls=MAX_CALLS)
        for register in self._registrations:
            register(server)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            await server.start(listening)
        except BaseException:
            listening.close()
            raise
        return server

    async def _start_grpcio(self, path: Path) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        for register in self._registrations:
            register(server)
        if server.add_insecure_port(f"unix:{path}") == 0:
            raise OSError
        await server.start()
        return server

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no new calls, give those under way ``grace_s`` seconds, remove the socket."""
        server, self._server = self._server, None
        if server is None:
            return
        self._path.unlink(missing_ok=True)
        await server.stop(grace_s)


def _make_way(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} is in the way: it is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise FailedPreconditionError(
                f"{path} belongs to a process that doesn't answer ({error}); stop it first"
            ) from None
    raise FailedPreconditionError(f"another daemon answers on {path}; stop it first")
