"""The command line's connection to the daemon, and how its failures look to a user.

Every failure ends as one line on stderr and an exit code; no traceback, no gRPC words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import typer

from snapshotter.rpc.pb.ember.control.v1 import control_pb2, control_pb2_grpc

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
_QUICK_S = 30.0


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Say on stderr what went wrong, and exit."""
    typer.echo(f"ember: {message}", err=True)
    raise typer.Exit(code)


class Daemon:
    """Calls of the control service; an error ends the command with a sentence and an exit code."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=[("grpc.enable_http_proxy", 0), ("grpc.default_authority", "localhost")],
        )
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            self._explain(error)

    def _explain(self, error: grpc.RpcError) -> NoReturn:
        code = error.code() if isinstance(error, grpc.Call) else None
        details = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
        # What the daemon itself answers begins with what it was doing, never like gRPC's own words.
        alone = not self._socket.exists() or details.startswith("failed to connect")
        if code == grpc.StatusCode.UNAVAILABLE and alone:
            fail(
                f"no daemon answers at {self._socket}; start it with `ember serve`"
                " or `systemctl start ember`, or name its configuration with --config",
                EXIT_NO_DAEMON,
            )
        fail(details)

    def status(self) -> dict[str, Any]:
        """The status document."""
        reply = self._guarded(
            lambda: self._control.Status(control_pb2.StatusRequest(), timeout=_QUICK_S)
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
        return self._guarded(lambda: self._control.Remove(request, timeout=300))

    def drain(self) -> Iterator[control_pb2.DrainProgress]:
        """What is still missing, once a second, until nothing is."""
        try:
            yield from self._control.Drain(control_pb2.DrainRequest())
        except grpc.RpcError as error:
            self._explain(error)
