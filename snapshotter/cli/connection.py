"""The command line's connection to the daemon, and how its failures look to a user.

Every failure ends as one line on stderr and an exit code; no traceback, no gRPC words.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import typer

from snapshotter.rpc.pb.ember.control.v1 import control_pb2, control_pb2_grpc
from snapshotter.rpc.said import is_the_daemons_own

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
QUICK_S = 30.0
_REMOVE_S = 300.0
_DOCUMENT_BYTES = 256 * 1024 * 1024
"""gRPC's own 4 MiB are too little for the status of a node with thousands of layers."""
_CONNECT_S = 2.0
_START = "start it with `ember serve` or `systemctl start ember`"


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Say on stderr what went wrong, and exit."""
    typer.echo(f"ember: {message}", err=True)
    raise typer.Exit(code)


def unreachable(path: Path) -> str:
    """Why nobody can be reached at the socket ``path``, and the way out; empty: somebody can."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return (
                f"no daemon answers at {path}; {_START},"
                " or name its configuration with --config or EMBER_CONFIG"
            )
        except ConnectionRefusedError:
            return f"no daemon answers at {path}: the one that made this socket is gone; {_START}"
        except PermissionError:
            return f"user {os.geteuid()} may not use {path}; run the command as root"
        except OSError as error:
            return f"no daemon answers at {path}: {error.strerror or error}"
    return ""


class Daemon:
    """Calls of the control service; an error ends the command with a sentence and an exit code."""

    def __init__(self, path: Path, quick_s: float = QUICK_S) -> None:
        self._path = path
        self._quick_s = quick_s
        self._channel = grpc.insecure_channel(
            f"unix:{path}",
            options=[
                ("grpc.enable_http_proxy", 0),
                ("grpc.default_authority", "localhost"),
                ("grpc.max_receive_message_length", _DOCUMENT_BYTES),
            ],
        )
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            self._explain(error)

    def _explain(self, error: grpc.RpcError) -> NoReturn:
        if not isinstance(error, grpc.Call):
            fail(f"the daemon at {self._path} cannot be asked: {error}")
        words = error.details() or error.code().name
        if is_the_daemons_own(error.trailing_metadata()):
            fail(words)
        match error.code():
            case grpc.StatusCode.UNAVAILABLE:
                why = unreachable(self._path)
                if why:
                    fail(why, EXIT_NO_DAEMON)
                fail(f"the daemon at {self._path} went away before it had answered; see its log")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                fail(f"the daemon at {self._path} does not answer in time; see its log")
            case grpc.StatusCode.UNIMPLEMENTED:
                fail(f"what answers at {self._path} is not Ember; see --config", EXIT_NO_DAEMON)
            case _:
                fail(f"the daemon at {self._path} failed: {words}")

    def status(self) -> dict[str, Any]:
        """The status document."""
        reply = self._guarded(
            lambda: self._control.Status(control_pb2.StatusRequest(), timeout=self._quick_s)
        )
        document: dict[str, Any] = json.loads(reply.json)
        return document

    def pull(self, image: str, namespace: str, platform: str) -> Iterator[control_pb2.PullProgress]:
        """The steps of a pull, as they come."""
        request = control_pb2.PullRequest(image=image, namespace=namespace, platform=platform)
        try:
            yield from self._control.Pull(request)
        except grpc.RpcError as error:
            self._explain(error)

    def remove(self, image: str, namespace: str, data_only: bool) -> control_pb2.RemoveResponse:
        """What a removal did."""
        request = control_pb2.RemoveRequest(image=image, namespace=namespace, data_only=data_only)
        return self._guarded(lambda: self._control.Remove(request, timeout=_REMOVE_S))

    def drain(self) -> Iterator[control_pb2.DrainProgress]:
        """What is still missing, once a second, until nothing is."""
        try:
            yield from self._control.Drain(control_pb2.DrainRequest())
        except grpc.RpcError as error:
            self._explain(error)
