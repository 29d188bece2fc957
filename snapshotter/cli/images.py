"""`ember images` and `ember status`: the daemon's status document as tables.

What --json prints is the document itself; the tables show nothing that is not in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from snapshotter.cli.connection import fail
from snapshotter.cli.screen import console, several, share, size, table
from snapshotter.errors import InvalidArgumentError
from snapshotter.oci.reference import parse_reference

Document = dict[str, Any]
NO_IMAGES = "no images yet; `ember pull IMAGE` brings one"


def _name(image: Document) -> str:
    names = image["names"]
    return str(names[0] if names else image["manifest"])


def _state(image: Document) -> str:
    """One or two words; what needs a sentence is said below the table."""
    if image["suspect"]:
        return "SUSPECT"
    if image["leaving"]:
        return "leaving"
    if image["namespaces"] == []:
        return "not in containerd"
    if not image["lazy"]:
        indexed = all(layer["state"] == "indexed" for layer in image["layers"])
        return "overlay, indexed" if indexed and image["layers"] else "not lazy"
    indexing = any(layer["state"].startswith("being indexed") for layer in image["layers"])
    stalled = any("nothing has come" in layer["state"] for layer in image["layers"])
    return "lazy, stalled" if stalled else "lazy, indexing" if indexing else "lazy"


def _remarks(image: Document) -> Iterator[str]:
    """What an operator must know of an image, each in a line of its own."""
    if image["suspect"]:
        yield f"SUSPECT    {_name(image)}: {image['suspect']}"
    elif image["leaving"]:
        yield f"leaving    {_name(image)}: removed, and goes when nothing uses it"
    elif not image["lazy"] and image["reason"]:
        yield f"not lazy   {_name(image)}: {image['reason']}"
    if image["namespaces"] == [] and not image["leaving"]:
        kept = "no namespace of containerd has it; what is here is for its next pull"
        yield f"not in containerd   {_name(image)}: {kept}, or `ember rm` takes it"
    for layer in image["layers"]:
        origin = layer["index_from"]
        if origin and origin["fault"]:
            yield f"untrusted  the index of layer {layer['digest']}: {origin['fault']}"
        if layer["trouble"]:
            what = f"layer {layer['digest']} of {_name(image)}"
            yield f"trouble    {what} does not come: {layer['trouble']}"


def _show_images(screen: Console, images: list[Document]) -> None:
    """A row for each name that an image goes by, then what needs words."""
    if not images:
        screen.print(NO_IMAGES)
        return
    rows = [
        (
            name,
            image["manifest"].removeprefix("sha256:")[:12],
            size(image["here_bytes"]),
            size(image["plain_bytes"]) if image["plain_bytes"] else "?",
            share(image["here_bytes"], image["plain_bytes"]),
            str(len(image["containers"])),
            _state(image),
        )
        for image in images
        for name in (image["names"] or [_name(image)])
    ]
    screen.print(table(("IMAGE", "DIGEST", "HERE", "OF", "SHARE", "RUNNING", "STATE"), rows))
    remarks = [remark for image in images for remark in _remarks(image)]
    if remarks:
        screen.print()
    for remark in remarks:
        screen.print(remark)


def show_images(document: Document, as_json: bool) -> None:
    """One line for each image."""
    if as_json:
        typer.echo(json.dumps(document["images"], indent=2))
        return
    screen = console()
    _show_images(screen, document["images"])
    _show_notes(screen, document)


def _show_notes(screen: Console, document: Document) -> None:
    for note in document["notes"]:
        screen.print(f"note       {note}")


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
    engine = daemon["engine"]
    why = engine["reason"].removeprefix(f"{engine['name']}: ")
    screen.print(f"engine     {engine['name']} ({why})")
    losses = daemon["keeper_losses"]
    lost = f", {several(losses, 'other')} died before it" if losses else ""
    screen.print(f"keeper     {daemon['keeper']}{lost}")
    _show_trust(screen, daemon["index"])
    misses = document["misses"]
    screen.print(
        f"misses     {misses['asked']} asked, {misses['failed']} failed,"
        f" longest wait {misses['longest_s']:.2f} s"
    )
    for one in document["waiting"]:
        reads = several(one["reads"], "read")
        waited = f"{one['longest_s']:.0f} s"
        screen.print(f"waiting    {reads} of view {one['view']}, {waited}: {one['why']}")
    for tier, count in sorted(document["tiers"].items()):
        screen.print(f"from {tier}: {size(count)}")
    for job in document["indexing"]:
        owner = next((f" of {_name(i)}" for i in document["images"] if _has(i, job)), "")
        done = f"{job['percent']} % of {size(job['size_bytes'])}"
        quiet = f", nothing has come for {job['quiet_s']:.0f} s" if job["quiet_s"] else ""
        screen.print(f"indexing   {job['layer']}{owner}: {done}{quiet}")
    _show_notes(screen, document)
    screen.print()
    _show_images(screen, document["images"])


def _show_trust(screen: Console, index: Document) -> None:
    keys = several(len(index["keys"]), "trusted key")
    screen.print(f"indexes    trust {index['trust']}, {keys} in {index['trusted_keys']}")
    for problem in index["problems"]:
        screen.print(f"           {problem}")
    if index["lookups"]:
        counts = [f"{one['count']} {one['outcome']}" for one in index["lookups"]]
        screen.print("lookups    " + ", ".join(counts))


def _index_from(layer: Document) -> str:
    """Who made a layer's index."""
    origin = layer["index_from"]
    if origin is None:
        return "–"
    if origin["origin"] == "signed":
        return f"key {origin['key'][:16]}"
    if origin["origin"] == "registry":
        return "registry, compared" if origin["compared"] else "registry, not compared"
    return str(origin["origin"])


def _has(image: Document, job: Document) -> bool:
    return any(layer["digest"] == job["layer"] for layer in image["layers"])


def _only(document: Document, text: str) -> Document:
    bare, full = text.removeprefix("sha256:"), text
    with contextlib.suppress(InvalidArgumentError):
        full = str(parse_reference(text))
    for image in document["images"]:
        digest = image["manifest"].removeprefix("sha256:")
        if {text, full} & set(image["names"]) or (len(bare) >= 6 and digest.startswith(bare)):
            return dict(image)
    return fail(f"no image {text!r} is known here; `ember images` lists them")


def _show_layers(screen: Console, image: Document) -> None:
    names = " ".join(image["names"]) or "no name"
    screen.print(f"{names} {image['manifest']}: {_state(image)}")
    rows = [
        (
            layer["digest"],
            size(layer["size_bytes"]),
            size(layer["view_bytes"]) if layer["view_bytes"] else "?",
            share(layer["here_bytes"], layer["view_bytes"]),
            ", ".join(f"{tier} {size(n)}" for tier, n in sorted(layer["tiers"].items())) or "–",
            size(layer["index_bytes"]),
            _index_from(layer),
            layer["state"],
        )
        for layer in image["layers"]
    ]
    columns = ("LAYER", "COMPRESSED", "PLAIN", "HERE", "FROM", "INDEX", "BY", "STATE")
    screen.print(table(columns, rows))
    for remark in _remarks(image):
        screen.print(remark)
    lookup = image["lookup"]
    if lookup is not None:
        why = f": {lookup['why']}" if lookup["why"] else ""
        screen.print(f"index of others: {lookup['outcome']}{why}")
    for container in image["containers"]:
        screen.print(f"runs: {container}")
