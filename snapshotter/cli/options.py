"""What several commands take: options, and checks that end a command with wrong usage.

Nothing of the daemon is loaded here: most commands are a question to one.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from snapshotter.cli.connection import EXIT_USAGE, fail
from snapshotter.config import Config, load
from snapshotter.errors import ConfigError, InvalidArgumentError
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import parse_reference

ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="EMBER_CONFIG",
        help="Configuration file [default: /etc/ember/config.toml]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document")]


def verb(name: str) -> Any:
    """A verb's module, loaded only for that verb: the daemon's libraries cost a third of a second,
    and most commands are a question to a daemon that has them."""
    return importlib.import_module(f"snapshotter.cli.{name}")


def read_config(path: Path | None) -> Config:
    """The configuration, or the end of the command with what is wrong in it."""
    try:
        return load(path)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


def check_reference(text: str) -> None:
    """End the command if no registry could have an image of this name."""
    try:
        parse_reference(text)
    except InvalidArgumentError as error:
        fail(str(error), EXIT_USAGE)


def check_platform(text: str) -> None:
    """End the command if ``text`` names no platform; empty is this node's."""
    try:
        if text:
            Platform.parse(text)
    except InvalidArgumentError as error:
        fail(str(error), EXIT_USAGE)
