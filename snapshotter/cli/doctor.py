"""`ember doctor`: each line is what was looked at, what was found, and the way out.

Works without a daemon: whoever calls it has mostly just failed to start one. Exit code 1 if
something is broken; what only costs laziness or speed is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import typer
from rich.text import Text

from snapshotter.cli.checks.check import Check, broken
from snapshotter.cli.checks.joined import containerd
from snapshotter.cli.checks.keys import keys
from snapshotter.cli.checks.node import daemon, kernel, space
from snapshotter.cli.connection import EXIT_FAILED
from snapshotter.cli.screen import console
from snapshotter.config import Config

Part = Callable[[Config], Iterator[Check]]
PARTS: tuple[Part, ...] = (kernel, space, daemon, containerd, keys)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def look(config: Config) -> Iterator[Check]:
    """Every part; one that cannot look says so and does not stop the others."""
    for part in PARTS:
        try:
            yield from part(config)
        except OSError as error:
            yield broken(part.__name__, str(error), "see whether this node is healthy")


def run(config: Config, as_json: bool) -> None:
    """Look at everything, print it, exit 1 if something is broken."""
    checks = list(look(config))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        screen = console()
        for check in checks:
            line = Text(f"{check.result:4}", style=_COLOURS[check.result])
            way_out = f" → {check.way_out}" if check.way_out else ""
            screen.print(line.append(f" {check.what}: {check.found}{way_out}", style="default"))
    if any(check.result == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)
