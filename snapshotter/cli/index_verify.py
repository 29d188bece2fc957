"""`ember index verify`: every artifact of an image, held to its signature, to the rules of its form
and, if asked, to the layers themselves.

It succeeds if some artifact is signed by a trusted key, and all such are right and whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from snapshotter.cli.connection import fail
from snapshotter.cli.index_show import document_of, trust_of
from snapshotter.cli.index_work import finish, registry, resolved, trusted
from snapshotter.cli.screen import several
from snapshotter.clock import SystemClock
from snapshotter.config import Config
from snapshotter.errors import CorruptError, NotFoundError, RefusedError
from snapshotter.image.index import LayerIndex
from snapshotter.indexes.build import Builder, default_parallel
from snapshotter.indexes.cache import IndexCache, check_windows
from snapshotter.indexes.compare import differences
from snapshotter.indexes.fetched import fetch_into
from snapshotter.indexes.find import Findings, Found, find
from snapshotter.indexes.keys import Keyring
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.resolver import ResolvedImage


def run(
    config: Config,
    image: str,
    platform: str,
    keys: tuple[Path, ...],
    deep: bool,
    as_json: bool,
) -> None:
    """Verify; the command fails if nothing may be trusted, or something trusted is wrong."""
    images = finish(_verify(config, image, platform, keys, deep))
    rows = [row for one in images for row in one.rows]
    wrong = [fault for row in rows if row.get("trusted_key") for fault in row["faults"]]
    without = [one for one in images if not any(row.get("trusted_key") for row in one.rows)]
    if as_json:
        ok = not wrong and not without
        typer.echo(json.dumps({"image": image, "ok": ok, "artifacts": rows}, indent=2))
    else:
        for row in rows:
            typer.echo(_sentence(row, deep))
    if wrong:
        fail(f"{image}: a signed index artifact is wrong: {wrong[0]}")
    if without:
        name = image if len(images) == 1 else f"{image} for {without[0].platform}"
        if without[0].rows:
            fail(f"{name}: no index artifact is signed by a trusted key")
        fail(f"{name} has no index artifact; `ember index build` makes one")


@dataclass(frozen=True, slots=True)
class Verified:
    """One platform's image, with what was found of each artifact."""

    platform: str
    rows: list[dict[str, Any]]


def _sentence(row: dict[str, Any], deep: bool) -> str:
    if "refused" in row:
        return f"refused: {row['refused']}"
    how = "derived again and compared" if deep else "well formed"
    state = "; ".join(row["faults"]) or f"{several(len(row['layers']), 'layer')}, {how}"
    return f"{row['artifact']} ({row['platform']}): {trust_of(row)}; {state}"


async def _verify(
    config: Config, image: str, platform: str, keys: tuple[Path, ...], deep: bool
) -> list[Verified]:
    ring = trusted(config, keys)
    reference = parse_reference(image)
    async with registry(config) as client:
        images = await resolved(client, reference, platform)
        return [await _one(client, one, ring, deep) for one in images]


async def _one(client: RegistryClient, image: ResolvedImage, ring: Keyring, deep: bool) -> Verified:
    pinned = image.reference.with_digest(image.manifest_digest)
    findings: Findings = await find(client, pinned, ring, every=True)
    folder = Path(tempfile.mkdtemp(prefix="ember-verify-", dir=os.environ.get("TMPDIR")))
    try:
        derived = await _derived(client, image, folder / "derived") if deep else None
        rows: list[dict[str, Any]] = []
        for number, found in enumerate(findings.found):
            place = folder / str(number)
            place.mkdir()
            faults = await _faults(client, found, image, place, derived)
            rows.append({**document_of(found, ring), "faults": faults})
            shutil.rmtree(place, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows += [{"refused": reason, "faults": [reason]} for reason in findings.refused]
    return Verified(str(image.platform), rows)


async def _derived(
    client: RegistryClient, image: ResolvedImage, folder: Path
) -> dict[str, LayerIndex]:
    """The indexes, made here of the layers' bytes and nothing else."""
    builder = Builder(
        client,
        IndexCache(folder, SystemClock()),
        lambda step: None,
        parallel=default_parallel(),
    )
    try:
        return {str(built.layer.digest): built.index for built in await builder.build(image)}
    finally:
        builder.close()


async def _faults(
    client: RegistryClient,
    found: Found,
    image: ResolvedImage,
    folder: Path,
    derived: dict[str, LayerIndex] | None,
) -> list[str]:
    """What is wrong with an artifact's content."""
    faults = []
    for layer in {layer.digest: layer for layer in image.layers}.values():
        try:
            path = await fetch_into(client, found, layer, folder)
            index = LayerIndex.open(path, layer=layer.digest)
            check_windows(index, path.with_suffix(".win"))
        except (RefusedError, CorruptError, NotFoundError) as error:
            faults.append(str(error).replace(f"{folder}/", ""))
            continue
        if derived is not None:
            told = differences(index, derived[str(layer.digest)])
            faults += [f"layer {layer.digest} is not what it says: {fault}" for fault in told]
    return faults
