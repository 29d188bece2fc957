"""`ember`: one command with a verb for each task; every verb answers --help.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no daemon, 130 interrupted. Results
go to stdout, progress and complaints to stderr.
"""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from snapshotter import __version__
from snapshotter.cli import changes, images, index, pull, warm
from snapshotter.cli.connection import EXIT_USAGE, Daemon, fail
from snapshotter.cli.options import (
    ConfigPath,
    Json,
    check_platform,
    check_reference,
    read_config,
    verb,
)
from snapshotter.config import DEFAULT_PATH

app = typer.Typer(
    name="ember",
    help="Has an image's bytes on this node before the pod asks for them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is plain text: brackets in it are brackets
)

Platforms = Annotated[
    str,
    typer.Option(
        help="Of an image for several platforms, take that of this one [default: the node's], as"
        " os/architecture[/variant]"
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="containerd namespace [default: k8s.io, the kubelet's, if containerd's CRI uses Ember,"
        " else default]",
    ),
]

_NAMESPACE = re.compile(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", re.ASCII)
_NAMESPACE_CHARACTERS = 76


def connect(path: Path | None) -> Daemon:
    """The daemon that the configuration at ``path`` belongs to."""
    return Daemon(read_config(path).socket)


def check_namespace(name: str | None) -> None:
    """End the command if containerd could not have a namespace of this name."""
    if name is None:
        return
    if len(name) > _NAMESPACE_CHARACTERS or not _NAMESPACE.fullmatch(name):
        fail(f"{name!r} cannot be a containerd namespace, such as k8s.io", EXIT_USAGE)


def check_image(text: str) -> None:
    """End the command if ``text`` can be neither a name nor a digest."""
    if not text.strip():
        fail("the image has no name; `ember images` lists what is here", EXIT_USAGE)


def show_version(wanted: bool) -> None:
    """Print the version and end the command."""
    if wanted:
        typer.echo(f"ember {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Has an image's bytes on this node before the pod asks for them."""


@app.command(name="serve", short_help="Run the daemon in the foreground")
def serve_command(
    config: ConfigPath = None,
    check: Annotated[bool, typer.Option("--check", help="Only check the configuration")] = False,
) -> None:
    """Run the daemon in the foreground (systemd: Type=notify)."""
    settings = read_config(config)
    if check:
        if config is None and not DEFAULT_PATH.exists():
            typer.echo(f"there is no {DEFAULT_PATH}; the defaults are used")
        else:
            typer.echo(f"{config or DEFAULT_PATH}: the configuration can be used")
        return
    verb("serve").run(settings, config)


@app.command(name="pull", short_help="Pull an image, lazily where it can")
def pull_command(
    image: Annotated[str, typer.Argument(help="Reference, such as registry.example/app:1.2")],
    config: ConfigPath = None,
    namespace: Namespace = None,
    platform: Platforms = "",
    json: Json = False,
) -> None:
    """Pull an image into containerd so that its containers can start before its bytes are here."""
    check_reference(image)
    check_namespace(namespace)
    check_platform(platform)
    pull.run(connect(config), image, namespace or "", platform, json)


@app.command(name="warm", short_help="Bring all bytes of an image to this node")
def warm_command(
    image: Annotated[str, typer.Argument(help="Reference, such as registry.example/app:1.2")],
    config: ConfigPath = None,
    platform: Platforms = "",
    json: Json = False,
) -> None:
    """Bring all bytes of an image to this node, before it is pulled or read."""
    check_reference(image)
    check_platform(platform)
    warm.run(connect(config), image, platform, json)


@app.command(name="images", short_help="List images, and how much of each is here")
def images_command(config: ConfigPath = None, json: Json = False) -> None:
    """List images: how much of each is here, what runs on it, and why it is not lazy."""
    images.show_images(connect(config).status(), json)


@app.command(name="status", short_help="Show the daemon and the images")
def status_command(
    image: Annotated[str | None, typer.Argument(help="Only this image, layer by layer")] = None,
    config: ConfigPath = None,
    json: Json = False,
) -> None:
    """Show the daemon, its data path, what is being indexed, and the images."""
    if image is not None:
        check_image(image)
    images.show_status(connect(config).status(), image, json)


@app.command(name="rm", short_help="Remove an image and its data")
def rm_command(
    image: Annotated[str, typer.Argument(help="Name or digest, as `ember images` shows it")],
    config: ConfigPath = None,
    data: Annotated[
        bool, typer.Option("--data", help="Only the data: the next start is lazy")
    ] = False,
    namespace: Namespace = None,
    json: Json = False,
) -> None:
    """Remove an image and its data from this node."""
    check_image(image)
    check_namespace(namespace)
    changes.remove(connect(config), image, namespace or "", data, json)


@app.command(name="drain", short_help="Fetch the rest of all that is mounted")
def drain_command(config: ConfigPath = None, json: Json = False) -> None:
    """Fetch the rest of everything that is mounted, before a stop that shall last."""
    changes.drain(connect(config), json)


@app.command(name="doctor", short_help="Check this node, and say the way out")
def doctor_command(config: ConfigPath = None, json: Json = False) -> None:
    """Check kernel, file system, containerd and permissions: what is, and the way out."""
    verb("doctor").run(read_config(config), json)


app.add_typer(index.app, name="index", short_help="Make, share and check indexes")


def main() -> None:
    """Entry point of the `ember` command."""
    # A reader that has seen enough ends the command as it ends any filter; the daemon undoes this.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="ember")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        sys.exit(130)


if __name__ == "__main__":
    main()
