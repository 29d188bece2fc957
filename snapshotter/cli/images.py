"""`ember images`, `status`, `rm` and `drain`: the daemon's status document as tables.

What --json prints is the document itself; the tables show nothing that is not in it.
"""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from snapshotter.cli.connection import Daemon, fail

Document = dict[str, Any]


def size(count: float) -> str:
    """Bytes for people: ``1.5 GB``; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def share(here: int, whole: int) -> str:
    """How much of something is here, in percent; 100 only when all of it is."""
    if whole == 0:
        return "–"
    return "100 %" if here >= whole else f"{min(99, 100 * here // whole)} %"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _name(image: Document) -> str:
    names = image["names"]
    return str(names[0] if names else image["manifest"])


def _state(image: Document) -> str:
    if image["suspect"]:
        return f"SUSPECT: {image['suspect']}"
    if image["lazy"]:
        return "lazy"
    return escape(f"not lazy: {image['reason']}") if image["reason"] else "not lazy"


def _image_table(images: list[Document]) -> Table:
    table = _table("IMAGE", "DIGEST", "HERE", "OF", "SHARE", "RUNNING", "STATE")
    for image in images:
        table.add_row(
            _name(image),
            image["manifest"].removeprefix("sha256:")[:12],
            size(image["here_bytes"]),
            size(image["plain_bytes"]) if image["plain_bytes"] else "?",
            share(image["here_bytes"], image["plain_bytes"]),
            str(len(image["containers"])),
            _state(image),
        )
    return table


def show_images(document: Document, as_json: bool) -> None:
    """One line for each image."""
    if as_json:
        typer.echo(json.dumps(document["images"], indent=2))
        return
    console = Console(soft_wrap=True)
    if not document["images"]:
        console.print("no images yet; `ember pull IMAGE` brings one")
        return
    console.print(_image_table(document["images"]))


def show_status(document: Document, image: str | None, as_json: bool) -> None:
    """The daemon and everything under way, or one image layer by layer."""
    if image is not None:
        document = _only(document, image)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console(soft_wrap=True)
    if image is not None:
        _show_layers(console, document)
        return
    daemon = document["daemon"]
    console.print(f"ember {daemon['version']}, pid {daemon['pid']}, up {daemon['up_s']:.0f} s")
    path = daemon["data_path"]
    console.print(f"data path  {path['name'] or 'none: images are fetched whole'}")
    for reason in path["reasons"]:
        console.print(f"           {reason}")
    console.print(f"engine     {daemon['engine']['name']} ({daemon['engine']['reason']})")
    console.print(f"keeper     {daemon['keeper']}")
    misses = document["misses"]
    console.print(
        f"misses     {misses['asked']} asked, {misses['failed']} failed,"
        f" longest wait {misses['longest_s']:.2f} s"
    )
    for tier, count in sorted(document["tiers"].items()):
        console.print(f"from {tier}: {size(count)}")
    for job in document["indexing"]:
        console.print(f"indexing   {job['layer']}: {job['percent']} % of {size(job['size_bytes'])}")
    for note in document["notes"]:
        console.print(f"note       {escape(note)}")
    for each in document["images"]:
        _show_troubles(console, each)
    console.print()
    console.print(_image_table(document["images"]))


def _show_troubles(console: Console, image: Document) -> None:
    """Layers of which nothing comes just now; in lines, for a reason is too long for a table."""
    for layer in image["layers"]:
        if layer["trouble"]:
            what = f"layer {layer['digest']} of {_name(image)}"
            console.print(escape(f"trouble    {what} does not come: {layer['trouble']}"))


def _only(document: Document, text: str) -> Document:
    bare = text.removeprefix("sha256:")
    for image in document["images"]:
        digest = image["manifest"].removeprefix("sha256:")
        if text in image["names"] or (len(bare) >= 6 and digest.startswith(bare)):
            return dict(image)
    return fail(f"no image {text!r} is known here; `ember images` lists them")


def _show_layers(console: Console, image: Document) -> None:
    console.print(f"{_name(image)} {image['manifest']}: {_state(image)}")
    table = _table("LAYER", "COMPRESSED", "PLAIN", "HERE", "FROM", "INDEX", "STATE")
    for layer in image["layers"]:
        table.add_row(
            layer["digest"],
            size(layer["size_bytes"]),
            size(layer["view_bytes"]) if layer["view_bytes"] else "?",
            share(layer["here_bytes"], layer["view_bytes"]),
            ", ".join(f"{tier} {size(n)}" for tier, n in sorted(layer["tiers"].items())) or "–",
            size(layer["index_bytes"]),
            escape(layer["state"]),
        )
    console.print(table)
    _show_troubles(console, image)
    for container in image["containers"]:
        console.print(f"runs: {container}")


def remove(daemon: Daemon, image: str, namespace: str, data_only: bool) -> None:
    """Say what went and what stayed; what stays is a failure only if nothing went."""
    reply = daemon.remove(image, namespace, data_only)
    for line in reply.removed:
        typer.echo(f"removed {line}")
    for line in reply.kept:
        typer.echo(f"ember: kept {line}", err=True)
    typer.echo(f"freed {size(reply.freed_bytes)}")
    if reply.kept and not reply.removed:
        raise typer.Exit(1)


def drain(daemon: Daemon) -> None:
    """Show what is left until nothing is."""
    console = Console(stderr=True)
    failed: list[str] = []
    with console.status("looking at what is mounted") as line:
        for state in daemon.drain():
            line.update(f"{state.views_left} views, {size(state.bytes_left)} to fetch")
            failed = list(state.failed)
    for fault in failed:
        typer.echo(f"ember: {fault}", err=True)
    if failed:
        fail(f"{len(failed)} views are not complete; what needs them must not outlive the daemon")
    typer.echo("everything that is mounted is here")
