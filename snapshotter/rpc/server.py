"""The gRPC server on its unix socket: limits, the socket's life, a clean stop.

A socket that nobody answers is left over from a killed process and is replaced; one that answers
belongs to another daemon and is not touched.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc.aio

from snapshotter.errors import ConfigError, FailedPreconditionError, UnavailableError

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""containerd's own limit on a proxy connection, both ways."""
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""The status document grows with the images of a node; containerd gets its lists in blocks."""
MAX_CALLS: Final = 4096
_PROBE_S: Final = 2.0
_MAX_PATH_BYTES: Final = 107

Registration = Callable[[grpc.aio.Server], None]


class RpcServer:
    """``await start()`` binds and serves; ``await stop()`` lets calls under way finish."""

    def __init__(self, path: Path, registrations: Sequence[Registration]) -> None:
        self._path = path
        self._registrations = registrations
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """FailedPreconditionError if another daemon answers on the socket."""
        if len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"socket path {self._path} is longer than {_MAX_PATH_BYTES} bytes")
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        await asyncio.to_thread(_make_way, self._path)
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
        # Bound under a name of our own and renamed: it never exists with open permissions.
        hidden = self._path.with_name(f".{os.getpid()}-{secrets.token_hex(3)}")
        hidden.unlink(missing_ok=True)
        try:
            bound = server.add_insecure_port(f"unix:{hidden}")
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise UnavailableError(f"cannot listen on {self._path}; is its directory writable?")
        await server.start()
        hidden.chmod(0o600)
        hidden.rename(self._path)
        self._server = server

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
