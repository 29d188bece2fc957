"""`ember pull`: progress on stderr, one line on stdout when it is done.

The daemon does the work and has the credentials; here is only what a user sees of it.
"""

from __future__ import annotations

import json
import time

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from snapshotter.cli.connection import Daemon
from snapshotter.cli.screen import several
from snapshotter.rpc.pb.ember.control.v1 import control_pb2


def run(daemon: Daemon, image: str, namespace: str, platform: str, as_json: bool) -> None:
    """Pull ``image`` and say how it went."""
    began_s = time.monotonic()
    last = control_pb2.PullProgress()
    lazy = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} layers"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        task = progress.add_task(escape(f"pulling {image}"), total=None)
        for step in daemon.pull(image, namespace, platform):
            last = step
            if step.state in ("lazy", "unpacked"):
                lazy += step.state == "lazy"
                progress.advance(task)
            if step.total:
                progress.update(task, total=step.total)
    seconds = time.monotonic() - began_s
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "image": image,
                    "digest": last.digest,
                    "namespace": last.namespace,
                    "layers": last.total,
                    "lazy_layers": lazy,
                    "why_not_lazy": last.reason,
                    "seconds": round(seconds, 3),
                },
                indent=2,
            )
        )
        return
    how = f"{lazy} of {several(last.total, 'layer')} lazy"
    if last.reason:
        how += f"; not lazy: {last.reason}"
    where = f"namespace {last.namespace}"
    typer.echo(f"{image} {last.digest} in {where} after {seconds:.2f} s ({how})")
