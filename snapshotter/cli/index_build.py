"""`ember index build`: progress on stderr, one line an image on stdout.

Every platform's image is built, signed and published after the other; layers that they share are
indexed once.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from snapshotter.cli.index_work import (
    ALL,
    finish,
    platform_of,
    refused,
    registry,
    resolved,
    short,
    trusted,
)
from snapshotter.cli.screen import several, size
from snapshotter.clock import SystemClock
from snapshotter.config import Config
from snapshotter.errors import ConfigError, EmberError, NotFoundError, RefusedError
from snapshotter.indexes.build import (
    Builder,
    Built,
    LayerSource,
    Shared,
    Step,
    default_parallel,
)
from snapshotter.indexes.cache import IndexCache, default_directory
from snapshotter.indexes.find import find
from snapshotter.indexes.keys import Keyring, SigningKey, load_signing_key
from snapshotter.indexes.layouts import open_layout
from snapshotter.indexes.publish import (
    LayoutTarget,
    Published,
    RegistryTarget,
    Subject,
    Target,
    publish,
)
from snapshotter.oci.pushing import Pusher
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.resolver import ResolvedImage
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.content_source import ContentSource

_LAYOUTS = ("oci", "oci-archive", "containerd")
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for; see the options of the command."""

    image: str
    source: str
    namespace: str
    platform: str
    output: Path | None
    push: bool
    sign: tuple[Path, ...]
    cache: Path | None
    reuse: tuple[str, ...]
    keys: tuple[Path, ...]
    parallel: int


def run(config: Config, order: Order, as_json: bool) -> None:
    """Build, and say what was built."""
    rows = finish(_run(config, order))
    if as_json:
        typer.echo(json.dumps({"images": [row.document() for row in rows]}, indent=2))
        return
    for row in rows:
        typer.echo(row.sentence())


@dataclass(frozen=True, slots=True)
class Row:
    """One platform's image, done."""

    image: ResolvedImage
    built: tuple[Built, ...]
    published: Published
    pushed: bool
    output: Path | None

    def document(self) -> dict[str, Any]:
        """For scripts."""
        entries = {entry.layer: entry for entry in self.published.artifact.layers}
        return {
            "image": str(self.image.reference),
            "manifest": str(self.image.manifest_digest),
            "platform": str(self.image.platform),
            "artifact": str(self.published.digest),
            "signed_by": list(self.published.key_ids),
            "pushed": self.pushed,
            "output": None if self.output is None else str(self.output),
            "new_bytes": self.published.new_bytes,
            "layers": [
                {
                    "digest": str(one.layer.digest),
                    "diff_id": str(one.layer.diff_id),
                    "how": one.how,
                    "index_bytes": entries[one.layer.digest].plain.size_bytes,
                    "packed_bytes": entries[one.layer.digest].packed.size_bytes,
                    "windows_bytes": one.index.windows_bytes,
                }
                for one in self.built
            ],
        }

    def sentence(self) -> str:
        """For people."""
        ways = {"built": "read", "cached": "from the cache", "shared": "from other artifacts"}
        counts = [(sum(one.how == how for one in self.built), words) for how, words in ways.items()]
        how = ", ".join(f"{count} {words}" for count, words in counts if count)
        keys = ", ".join(map(short, self.published.key_ids))
        where = " and ".join(
            [*(["pushed"] if self.pushed else []), *([f"in {self.output}"] if self.output else [])]
        )
        signed = f"signed by {keys}" if keys else "not signed"
        return (
            f"{self.image.reference} ({self.image.platform}, {self.image.manifest_digest}): "
            f"{several(len(self.built), 'layer')} ({how}); artifact {self.published.digest} "
            f"{where}, {size(self.published.new_bytes)} new, {signed}"
        )


async def _run(config: Config, order: Order) -> list[Row]:
    keys = [load_signing_key(path) for path in order.sign]
    ring = _with_own(trusted(config, order.keys), keys)
    cache = IndexCache(order.cache or default_directory(dict(os.environ)), SystemClock())
    async with registry(config) as client, _source(config, order, client) as source:
        images = await _resolved(source, order)
        shared = await _shared(client, images, order, ring)
        with _Bars(order.image) as bars:
            builder = Builder(
                source,
                cache,
                bars.told,
                parallel=order.parallel or default_parallel(),
                shared=shared,
            )
            try:
                rows = [await _one(client, image, builder, keys, order) for image in images]
            finally:
                builder.close()
    cache.trim()
    return rows


def _with_own(ring: Keyring, keys: list[SigningKey]) -> Keyring:
    """What we sign ourselves we may take up again."""
    own = {key.key_id: key.key.public_key() for key in keys}
    return replace(ring, keys={**ring.keys, **own})


@asynccontextmanager
async def _source(
    config: Config, order: Order, client: RegistryClient
) -> AsyncGenerator[LayerSource, None]:
    kind, colon, rest = order.source.partition(":")
    if order.source == "registry":
        yield client
    elif order.source == "containerd":
        containerd = Containerd(config.containerd.address, config.containerd.timeout)
        try:
            yield ContentSource(containerd, order.namespace)
        finally:
            await containerd.close()
    elif kind in _LAYOUTS and colon and rest:
        if kind == "containerd" and parse_reference(order.image).digest is None:
            raise ConfigError(
                f"--source {order.source}: containerd's directory knows no names; give the image "
                "with its digest, NAME@sha256:…, as `ctr images ls` shows it"
            )
        yield open_layout(kind, rest)
    else:
        raise ConfigError(
            f"--source {order.source!r} is none of registry, containerd, containerd:DIRECTORY, "
            "oci:PATH[:NAME], oci-archive:PATH[:NAME]"
        )


async def _resolved(source: LayerSource, order: Order) -> list[ResolvedImage]:
    return await resolved(source, parse_reference(order.image), order.platform)


async def _shared(
    client: RegistryClient, images: list[ResolvedImage], order: Order, ring: Keyring
) -> list[Shared]:
    """The signed artifacts to take layers from; what can't be had is only said."""
    if not ring.keys:
        return []
    pinned = [image.reference.with_digest(image.manifest_digest) for image in images]
    for name in order.reuse:
        other = parse_reference(name)
        single = "" if order.platform == ALL else order.platform
        one = await client.resolve(other, platform_of(single))
        pinned.append(other.with_digest(one.manifest_digest))
    found = []
    for number, image in enumerate(pinned):
        try:
            signed = (await find(client, image, ring)).signed
        except EmberError as error:
            if number >= len(images):
                raise
            typer.echo(f"ember: indexes that are there already can't be read: {error}", err=True)
            continue
        if signed is not None:
            found.append(Shared(client, signed))
        elif number >= len(images):
            raise RefusedError(f"--reuse {image}: no index artifact that a trusted key signed")
    return found


async def _one(
    client: RegistryClient,
    image: ResolvedImage,
    builder: Builder,
    keys: list[SigningKey],
    order: Order,
) -> Row:
    subject = Subject.of(image)
    built = await builder.build(image)
    targets: list[Target] = []
    if order.output is not None:
        targets.append(LayoutTarget(order.output))
    if order.push:
        if order.source != "registry":
            await _tell_if_absent(client, image)
        pusher = Pusher(client.asker, image.reference, SystemClock())
        targets.append(RegistryTarget(pusher, subject))
    for target in targets:
        try:
            published = await publish(subject, [one.local for one in built], keys, target)
        except EmberError as error:
            raise refused(error) from error
    return Row(image, tuple(built), published, order.push, order.output)


async def _tell_if_absent(client: RegistryClient, image: ResolvedImage) -> None:
    """An image that was built from elsewhere may be another one than its repository has."""
    with contextlib.suppress(EmberError):  # pushing says what else is wrong
        try:
            await client.manifest(image.reference.with_digest(image.manifest_digest))
        except NotFoundError:
            typer.echo(
                f"ember: {image.reference.name} does not have image {image.manifest_digest}: no "
                "node finds its indexes before it is pushed there",
                err=True,
            )


class _Bars(contextlib.AbstractContextManager["_Bars"]):
    """Progress on a terminal; elsewhere a line when a layer is done."""

    def __init__(self, image: str) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._silent = not console.is_terminal
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=self._silent)
        self._tasks: dict[str, TaskID] = {}
        self._image = image

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def told(self, step: Step) -> None:
        """Show a step."""
        digest = str(step.layer.digest)
        if step.note:
            note = f"ember: layer {digest}: {step.note}"
            self._progress.console.print(note, soft_wrap=True)
            return
        if self._silent:
            if step.how not in ("reading",):
                typer.echo(f"{digest} {step.how}", err=True)
            return
        task = self._tasks.get(digest)
        if task is None:
            name = digest.partition(":")[2][:_DIGITS]
            task = self._tasks[digest] = self._progress.add_task(name, total=step.layer.size)
        self._progress.update(task, completed=step.done_bytes)
