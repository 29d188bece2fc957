"""`ember images` and `ember status`: the daemon's status document as tables.

What --json prints is the document itself; the tables show nothing that is not in it.
"""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from snapshotter.cli.connection import fail
from snapshotter.cli.screen import console, share, size, table

Document = dict[str, Any]
NO_IMAGES = "no images yet; `ember pull IMAGE` brings one"


def _name(image: Document) -> str:
    names = image["names"]
    return str(names[0] if names else image["manifest"])


def _state(image: Document) -> str:
    if image["suspect"]:
        return f"SUSPECT: {image['suspect']}"
    if image["leaving"]:
        return "removed, and goes when nothing uses it"
    if image["lazy"]:
        return "lazy"
    return f"not lazy: {image['reason']}" if image["reason"] else "not lazy"


def _images(images: list[Document]) -> Table:
    rows = [
        (
            _name(image),
            image["manifest"].removeprefix("sha256:")[:12],
            size(image["here_bytes"]),
            size(image["plain_bytes"]) if image["plain_bytes"] else "?",
            share(image["here_bytes"], image["plain_bytes"]),
            str(len(image["containers"])),
            _state(image),
        )
        for image in images
    ]
    return table(("IMAGE", "DIGEST", "HERE", "OF", "SHARE", "RUNNING", "STATE"), rows)


def show_images(document: Document, as_json: bool) -> None:
    """One line for each image."""
    if as_json:
        typer.echo(json.dumps(document["images"], indent=2))
        return
    images = document["images"]
    console().print(_images(images) if images else NO_IMAGES)


def show_status(document: Document, image: str | None, as_json: bool) -> None:
    """The daemon and everything under way, or one image layer by layer."""
    if image is not None:
        document = _only(document, image)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    elif image is not None:
        _show_layers(console(), document)
    else:
        _show_daemon(console(), document)


def _show_daemon(screen: Console, document: Document) -> None:
    daemon = document["daemon"]
    screen.print(f"ember {daemon['version']}, pid {daemon['pid']}, up {daemon['up_s']:.0f} s")
    path = daemon["data_path"]
    screen.print(f"data path  {path['name'] or 'none: images are fetched whole'}")
    for reason in path["reasons"]:
        screen.print(f"           {reason}")
    screen.print(f"engine     {daemon['engine']['name']} ({daemon['engine']['reason']})")
    screen.print(f"keeper     {daemon['keeper']}")
    misses = document["misses"]
    screen.print(
        f"misses     {misses['asked']} asked, {misses['failed']} failed,"
        f" longest wait {misses['longest_s']:.2f} s"
    )
    for one in document["waiting"]:
        reads = f"{one['reads']} read" + ("s" if one["reads"] > 1 else "")
        waited = f"{one['longest_s']:.0f} s"
        screen.print(f"waiting    {reads} of view {one['view']}, {waited}: {one['why']}")
    for tier, count in sorted(document["tiers"].items()):
        screen.print(f"from {tier}: {size(count)}")
    for job in document["indexing"]:
        screen.print(f"indexing   {job['layer']}: {job['percent']} % of {size(job['size_bytes'])}")
    for note in document["notes"]:
        screen.print(f"note       {note}")
    for each in document["images"]:
        _show_troubles(screen, each)
    screen.print()
    screen.print(_images(document["images"]) if document["images"] else NO_IMAGES)


def _show_troubles(screen: Console, image: Document) -> None:
    """Layers of which nothing comes just now; in lines, for a reason is too long for a table."""
    for layer in image["layers"]:
        if layer["trouble"]:
            what = f"layer {layer['digest']} of {_name(image)}"
            screen.print(f"trouble    {what} does not come: {layer['trouble']}")


def _only(document: Document, text: str) -> Document:
    bare = text.removeprefix("sha256:")
    for image in document["images"]:
        digest = image["manifest"].removeprefix("sha256:")
        if text in image["names"] or (len(bare) >= 6 and digest.startswith(bare)):
            return dict(image)
    return fail(f"no image {text!r} is known here; `ember images` lists them")


def _show_layers(screen: Console, image: Document) -> None:
    screen.print(f"{_name(image)} {image['manifest']}: {_state(image)}")
    rows = [
        (
            layer["digest"],
            size(layer["size_bytes"]),
            size(layer["view_bytes"]) if layer["view_bytes"] else "?",
            share(layer["here_bytes"], layer["view_bytes"]),
            ", ".join(f"{tier} {size(n)}" for tier, n in sorted(layer["tiers"].items())) or "–",
            size(layer["index_bytes"]),
            layer["state"],
        )
        for layer in image["layers"]
    ]
    columns = ("LAYER", "COMPRESSED", "PLAIN", "HERE", "FROM", "INDEX", "STATE")
    screen.print(table(columns, rows))
    _show_troubles(screen, image)
    for container in image["containers"]:
        screen.print(f"runs: {container}")
