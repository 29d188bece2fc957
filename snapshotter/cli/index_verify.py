"""`ember index verify`: every artifact of an image, held to its signature, to the rules of its form
and, if asked, to the layers themselves.

It succeeds if some artifact is signed by a trusted key, and all such are right and whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import typer

from snapshotter.cli.connection import fail
from snapshotter.cli.index_show import document_of, trust_of
from snapshotter.cli.index_work import finish, platform_of, registry, trusted
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
    rows = finish(_verify(config, image, platform, keys, deep))
    signed = [row for row in rows if row.get("trusted_key")]
    wrong = [fault for row in signed for fault in row["faults"]]
    if as_json:
        ok = bool(signed) and not wrong
        typer.echo(json.dumps({"image": image, "ok": ok, "artifacts": rows}, indent=2))
    else:
        for row in rows:
            typer.echo(_sentence(row, deep))
    if wrong:
        fail(f"{image}: a signed index artifact is wrong: {wrong[0]}")
    if not rows:
        fail(f"{image} has no index artifact; `ember index build` makes one")
    if not signed:
        fail(f"{image}: no index artifact is signed by a trusted key")


def _sentence(row: dict[str, Any], deep: bool) -> str:
    if "refused" in row:
        return f"refused: {row['refused']}"
    how = "derived again and compared" if deep else "well formed"
    state = "; ".join(row["faults"]) or f"{several(len(row['layers']), 'layer')}, {how}"
    return f"{row['artifact']} ({row['platform']}): {trust_of(row)}; {state}"


async def _verify(
    config: Config, image: str, platform: str, keys: tuple[Path, ...], deep: bool
) -> list[dict[str, Any]]:
    ring = trusted(config, keys)
    reference = parse_reference(image)
    async with registry(config) as client:
        resolved = await client.resolve(reference, platform_of(platform))
        pinned = reference.with_digest(resolved.manifest_digest)
        findings: Findings = await find(client, pinned, ring, every=True)
        folder = Path(tempfile.mkdtemp(prefix="ember-verify-", dir=os.environ.get("TMPDIR")))
        try:
            derived = await _derived(client, resolved, folder / "derived") if deep else None
            rows = []
            for number, found in enumerate(findings.found):
                place = folder / str(number)
                place.mkdir()
                faults = await _faults(client, found, resolved, place, derived)
                rows.append(
                    {
                        **document_of(found.artifact),
                        "artifact": str(found.digest),
                        "trusted_key": found.key_id,
                        "key_name": ring.names.get(found.key_id or "", ""),
                        "why_not_trusted": found.refusal,
                        "faults": faults,
                    }
                )
                shutil.rmtree(place, ignore_errors=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return rows + [{"refused": reason, "faults": [reason]} for reason in findings.refused]


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
