"""`ember index`: make an image's indexes where it is built, share them, look at them, check them.

No daemon and no root: of the configuration only what concerns registries and trusted keys is read.
The verbs' own modules are loaded when they are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snapshotter.cli.connection import fail
from snapshotter.cli.options import (
    ConfigPath,
    Json,
    check_platform,
    check_reference,
    read_config,
    verb,
)

app = typer.Typer(
    name="index",
    help="Make, share and check the indexes that let images start before their bytes are here.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Image = Annotated[str, typer.Argument(help="Reference, such as registry.example/app:1.2")]
Several = Annotated[
    str,
    typer.Option(
        "--platform", help="As os/architecture[/variant], or all [default: this machine's]"
    ),
]
One = Annotated[
    str, typer.Option("--platform", help="As os/architecture[/variant] [default: this machine's]")
]
Keys = Annotated[
    list[Path] | None,
    typer.Option(
        "--key",
        help="Trust the public key in this file, or the *.pub of this directory, instead of those"
        " of /etc/ember/keys; may be repeated",
    ),
]


def _check_platforms(text: str) -> None:
    if text != "all":
        check_platform(text)


@app.command(name="build", short_help="Index an image, and push the indexes beside it")
def build_command(
    image: Image,
    config: ConfigPath = None,
    source: Annotated[
        str,
        typer.Option(
            help="Where the layers are read: registry, oci:PATH[:NAME], oci-archive:PATH[:NAME],"
            " containerd (by its socket, see --namespace) or containerd:DIRECTORY"
        ),
    ] = "registry",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="containerd namespace of --source containerd")
    ] = "default",
    platform: Several = "",
    output: Annotated[
        Path | None,
        typer.Option(help="Write the artifact to this directory, as an OCI layout, and push none"),
    ] = None,
    push: Annotated[
        bool, typer.Option("--push", help="Push, beside --output too [default without it]")
    ] = False,
    sign: Annotated[
        list[Path] | None,
        typer.Option(help="Sign with the private key in this file; may be repeated"),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep indexes here for later builds [default: ~/.cache/ember/index]"),
    ] = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(help="Take layers out of the signed artifact of this image; may be repeated"),
    ] = None,
    keys: Keys = None,
    parallel: Annotated[
        int,
        typer.Option(
            min=0, max=64, show_default=False, help="Layers read at once [default: by the cores]"
        ),
    ] = 0,
    json: Json = False,
) -> None:
    """Index every layer of an image and push the indexes beside it, as one OCI artifact."""
    for name in (image, *(reuse or [])):
        check_reference(name)
    _check_platforms(platform)
    module = verb("index_build")
    module.run(
        read_config(config),
        module.Order(
            image=image,
            source=source,
            namespace=namespace,
            platform=platform,
            output=output,
            push=push or output is None,
            sign=tuple(sign or ()),
            cache=cache,
            reuse=tuple(reuse or ()),
            keys=tuple(keys or ()),
            parallel=parallel,
        ),
        json,
    )


@app.command(name="show", short_help="Describe the index artifacts of an image")
def show_command(
    image: Annotated[
        str, typer.Argument(help="Reference, or the path of an .idx file or of an OCI layout")
    ],
    config: ConfigPath = None,
    platform: Several = "",
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Describe the index artifacts of an image, or an index on disk."""
    _check_platforms(platform)
    if not Path(image).exists():
        if image.endswith(".idx") or image.startswith(("/", "./", "../")):
            fail(f"{image}: there is no such file or directory")
        check_reference(image)
    verb("index_show").run(read_config(config), image, platform, tuple(keys or ()), json)


@app.command(name="pull", short_help="Fetch the indexes of an image to files")
def pull_command(
    image: Image,
    output: Annotated[Path, typer.Option(help="Directory for the .idx and .win files")],
    config: ConfigPath = None,
    platform: One = "",
    keys: Keys = None,
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Take an artifact that no trusted key signed, too")
    ] = False,
    json: Json = False,
) -> None:
    """Fetch the indexes of an image to files, checked."""
    check_reference(image)
    check_platform(platform)
    verb("index_pull").run(
        read_config(config), image, platform, output, tuple(keys or ()), unsigned, json
    )


@app.command(name="verify", short_help="Check index artifacts and their signatures")
def verify_command(
    image: Image,
    config: ConfigPath = None,
    platform: Several = "",
    keys: Keys = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every layer, index it anew, and compare")
    ] = False,
    json: Json = False,
) -> None:
    """Check the index artifacts of an image: structure, signatures, and with --deep the truth."""
    check_reference(image)
    _check_platforms(platform)
    verb("index_verify").run(read_config(config), image, platform, tuple(keys or ()), deep, json)


@app.command(name="keygen")
def keygen_command(
    path: Annotated[Path, typer.Argument(help="File for the private key; PATH.pub the public one")],
    json: Json = False,
) -> None:
    """Make a key to sign indexes with."""
    verb("index_keygen").run(path, json)
