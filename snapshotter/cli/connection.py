"""The command line's connection to the daemon, and how its failures look to a user.

Every failure ends as one line on stderr and an exit code; no traceback, no gRPC words.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import typer

from snapshotter.cli.checks.peer import listener
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
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", _DOCUMENT_BYTES),
)
_CONNECT_S = 2.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""With an empty SETTINGS frame (RFC 9113, 3.4); a server answers with its own."""
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
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
        except (BlockingIOError, TimeoutError):  # as many wait for it as the kernel lets
            return still(path)
        except OSError as error:
            return f"no daemon answers at {path}: {error.strerror or error}"
    return ""


def still(path: Path) -> str:
    """What to say of a daemon that holds its socket and gives no answer."""
    pid = listener(path)
    who, end = (f"process {pid}", f"`kill -9 {pid}`") if pid else ("of another container", "end it")
    return (
        f"the daemon at {path} ({who}) is there but does not answer; see its log, and if it stays"
        f" so {end} and start it again: readers wait meanwhile"
    )


def silence(path: Path, wait_s: float) -> str:
    """As ``still`` if who listens at ``path`` has no answer in ``wait_s`` seconds, else empty."""
    with grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:
        try:
            stub = control_pb2_grpc.ControlStub(channel)
            stub.Status(control_pb2.StatusRequest(), timeout=wait_s)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or is_the_daemons_own(error.trailing_metadata()):
                return ""
            return still(path) if error.code() in _NO_ANSWER else ""
    return ""


def _greets(path: Path) -> bool:
    """Whether a server of gRPC says a first word there, which a process that stands still can't."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
    ):
        probe.settimeout(_CONNECT_S)
        probe.connect(str(path))
        probe.sendall(_HTTP2_PREFACE)
        return bool(probe.recv(1))
    return False


class Daemon:
    """Calls of the control service; an error ends the command with a sentence and an exit code."""

    def __init__(self, path: Path, quick_s: float = QUICK_S) -> None:
        self._path = path
        self._quick_s = quick_s
        self._channel = grpc.insecure_channel(
            f"unix:{path}",
            options=_OPTIONS,
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
                if not _greets(self._path):
                    fail(still(self._path))
                fail(f"the daemon at {self._path} went away before it had answered; see its log")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                fail(still(self._path))
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

    def warm(self, image: str, platform: str) -> Iterator[control_pb2.WarmProgress]:
        """How far it is, some times a second, until all of it is here."""
        try:
            yield from self._control.Warm(control_pb2.WarmRequest(image=image, platform=platform))
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
