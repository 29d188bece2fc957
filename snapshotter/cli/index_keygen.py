"""`ember index keygen`: a key to sign with, and the public half for the nodes."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from snapshotter.cli.connection import EXIT_USAGE, fail
from snapshotter.errors import EmberError
from snapshotter.indexes.keys import PUBLIC_SUFFIX, write_key_pair


def run(path: Path, as_json: bool) -> None:
    """Write the pair and name it."""
    try:
        key = write_key_pair(path)
    except EmberError as error:
        fail(str(error), EXIT_USAGE)
    public = path.with_name(path.name + PUBLIC_SUFFIX)
    if as_json:
        document = {"key_id": key.key_id, "private": str(path), "public": str(public)}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"key {key.key_id}: keep {path} secret, put {public} into /etc/ember/keys of nodes")
