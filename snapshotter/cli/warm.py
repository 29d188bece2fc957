"""`ember warm`: bars on stderr, one line on stdout when all of the image is here.

The daemon does the work and keeps what has come, however this command ends.
"""

from __future__ import annotations

import json
import time

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from snapshotter.cli.connection import Daemon
from snapshotter.cli.screen import several, size
from snapshotter.rpc.pb.ember.control.v1 import control_pb2

_BARS = 20
"""So many layers have a bar of their own; an image may have more than a screen has lines."""
_DIGITS = 12


def run(daemon: Daemon, image: str, platform: str, as_json: bool) -> None:
    """Warm ``image`` and say how it went."""
    began_s = time.monotonic()
    last = control_pb2.WarmProgress()
    console = Console(stderr=True)
    silent = not console.is_terminal
    with _bars(console, silent) as progress:
        whole = progress.add_task(escape(f"warming {image}"), total=None)
        bars: dict[str, TaskID] = {}
        for state in daemon.warm(image, platform):
            last = state
            done = sum(layer.done_bytes for layer in state.layers)
            progress.update(whole, completed=done, total=_total(state))
            for layer in state.layers[:_BARS]:
                bar = bars.get(layer.digest)
                if bar is None:
                    words = f"  {layer.digest.partition(':')[2][:_DIGITS]}"
                    bar = bars[layer.digest] = progress.add_task(words, total=layer.size_bytes)
                progress.update(bar, completed=layer.done_bytes)
    _tell(image, last, time.monotonic() - began_s, as_json)


def _bars(console: Console, silent: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=silent)


def _total(state: control_pb2.WarmProgress) -> int:
    return sum(layer.size_bytes for layer in state.layers)


def _tell(image: str, last: control_pb2.WarmProgress, seconds: float, as_json: bool) -> None:
    fetched = sum(layer.fetched_bytes for layer in last.layers)
    if as_json:
        document = {
            "image": image,
            "digest": last.digest,
            "size_bytes": _total(last),
            "fetched_bytes": fetched,
            "layers": [
                {
                    "digest": layer.digest,
                    "size_bytes": layer.size_bytes,
                    "fetched_bytes": layer.fetched_bytes,
                }
                for layer in last.layers
            ],
            "seconds": round(seconds, 3),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    rate = f", {size(fetched / seconds)}/s" if fetched and seconds else ""
    what = f"{several(len(last.layers), 'layer')}, {size(_total(last))}"
    typer.echo(
        f"{image} {last.digest} is here after {seconds:.2f} s"
        f" ({what}; {size(fetched)} fetched{rate})"
    )
