"""`ember rm` and `ember drain`: what was done to stdout, what could not be done to stderr.

Exit code 1 if nothing of what was asked for could be done, or a drain is not complete.
"""

from __future__ import annotations

import json

import typer
from rich.console import Console

from snapshotter.cli.connection import EXIT_FAILED, Daemon, fail
from snapshotter.cli.screen import several, size
from snapshotter.rpc.pb.ember.control.v1 import control_pb2

_REASONS = 64
"""So many different reasons why a drain does not get on are told."""


def remove(daemon: Daemon, image: str, namespace: str, data_only: bool, as_json: bool) -> None:
    """Say what went and what stayed; what stays is a failure only if nothing went."""
    reply = daemon.remove(image, namespace, data_only)
    if as_json:
        document = {
            "image": image,
            "freed_bytes": reply.freed_bytes,
            "removed": list(reply.removed),
            "kept": list(reply.kept),
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        for line in reply.removed:
            typer.echo(f"removed {line}")
        for line in reply.kept:
            typer.echo(f"ember: kept {line}", err=True)
        typer.echo(f"freed {size(reply.freed_bytes)}")
    if reply.kept and not reply.removed:
        raise typer.Exit(EXIT_FAILED)


def drain(daemon: Daemon, as_json: bool) -> None:
    """Show what is left until nothing is."""
    screen = Console(stderr=True, markup=False, highlight=False)
    last, told = control_pb2.DrainProgress(), 0
    reasons: set[str] = set()
    with screen.status("looking at what is mounted") as line:
        for number, state in enumerate(daemon.drain()):
            last = state
            left = f"{several(state.views_left, 'view')}, {size(state.bytes_left)} to fetch"
            line.update(left)
            # A log wants to know too, if it takes longer than a moment, but not every second.
            if number and not screen.is_terminal and state.views_left not in (0, told):
                told = state.views_left
                typer.echo(f"ember: {left}", err=True)
            for reason in state.waiting:
                if reason not in reasons and len(reasons) < _REASONS:
                    reasons.add(reason)
                    screen.print(f"ember: {reason}", soft_wrap=True)
    failed = list(last.failed)
    if as_json:
        document = {
            "complete": not failed,
            "views_left": last.views_left,
            "bytes_left": last.bytes_left,
            "failed": failed,
        }
        typer.echo(json.dumps(document, indent=2))
    for fault in failed:
        typer.echo(f"ember: {fault}", err=True)
    if failed:
        verb = "is" if len(failed) == 1 else "are"
        fail(
            f"{several(len(failed), 'view')} {verb} not complete;"
            " do not stop the daemon while something needs them"
        )
    if not as_json:
        typer.echo("everything that is mounted is here")
