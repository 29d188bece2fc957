"""`ember index show`: the artifacts of an image, those of an OCI layout, or one index file.

What is shown was checked as far as reading it goes; `verify` checks all of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from snapshotter.cli.index_work import finish, registry, resolved, short, trusted
from snapshotter.cli.screen import console, several, size, table
from snapshotter.config import Config
from snapshotter.image.index import LayerIndex
from snapshotter.indexes.artifact import ARTIFACT_TYPE, parse_artifact
from snapshotter.indexes.find import Found, find, weigh
from snapshotter.indexes.keys import Keyring
from snapshotter.indexes.layouts import Directory, LayoutSource
from snapshotter.oci.reference import parse_reference

_DIGITS = 19


def run(config: Config, image: str, platform: str, keys: tuple[Path, ...], as_json: bool) -> None:
    """Describe what ``image`` names."""
    path = Path(image)
    if path.is_file():
        _show_file(path, as_json)
        return
    if path.is_dir():
        rows = finish(_in_layout(path, trusted(config, keys)))
    else:
        rows = finish(_of_image(config, image, platform, keys))
    if as_json:
        typer.echo(json.dumps({"artifacts": rows}, indent=2))
        return
    if not rows:
        typer.echo(f"{image} has no index artifact; `ember index build` makes one")
    for row in rows:
        _print(row)


async def _of_image(
    config: Config, image: str, platform: str, keys: tuple[Path, ...]
) -> list[dict[str, Any]]:
    ring = trusted(config, keys)
    reference = parse_reference(image)
    rows: list[dict[str, Any]] = []
    async with registry(config) as client:
        for one in await resolved(client, reference, platform):
            pinned = reference.with_digest(one.manifest_digest)
            findings = await find(client, pinned, ring, every=True)
            rows += [document_of(found, ring) for found in findings.found]
            rows += [{"refused": reason} for reason in findings.refused]
    return rows


async def _in_layout(path: Path, ring: Keyring) -> list[dict[str, Any]]:
    """The index artifacts that an OCI layout lists."""
    source = LayoutSource(Directory(path))
    rows = []
    for entry in await source.entries():
        if entry.artifact_type == ARTIFACT_TYPE:
            what = f"{path}: {entry.digest}"
            artifact = parse_artifact(await source.blob_of(entry), what)
            found = await weigh(source, artifact, entry.digest, "", ring, what)
            rows.append(document_of(found, ring))
    return rows


def document_of(found: Found, ring: Keyring) -> dict[str, Any]:
    """An artifact for scripts."""
    artifact = found.artifact
    return {
        "artifact": str(found.digest),
        "image": str(artifact.image.digest),
        "platform": str(artifact.platform),
        "signed": artifact.envelope is not None,
        "layers": [
            {
                "digest": str(layer.layer),
                "diff_id": str(layer.diff_id),
                "index_digest": str(layer.plain.digest),
                "index_bytes": layer.plain.size_bytes,
                "packed_bytes": layer.packed.size_bytes,
                "windows_bytes": layer.windows.size_bytes if layer.windows else 0,
            }
            for layer in artifact.layers
        ],
        "trusted_key": found.key_id,
        "key_name": ring.names.get(found.key_id or "", ""),
        "why_not_trusted": found.refusal,
    }


def trust_of(row: dict[str, Any]) -> str:
    """In a few words, who stands for an artifact."""
    if row["trusted_key"]:
        return f"signed by {short(row['trusted_key'])} {row['key_name']}".strip()
    why: str = row["why_not_trusted"]
    return f"not trusted: {why.partition(row['artifact'] + ': ')[2] or why}"


def _print(row: dict[str, Any]) -> None:
    out = console()
    if "refused" in row:
        out.print(f"refused: {row['refused']}")
        return
    layers = row["layers"]
    total = sum(layer["packed_bytes"] for layer in layers)
    windows = sum(layer["windows_bytes"] for layer in layers)
    out.print(f"artifact {row['artifact']} of image {row['image']} ({row['platform']})")
    out.print(f"{trust_of(row)}; {several(len(layers), 'layer')}", end="")
    out.print(f", {size(total)} to mount, {size(windows)} of windows")
    cells = [
        [
            layer["digest"][:_DIGITS],
            size(layer["index_bytes"]),
            size(layer["packed_bytes"]),
            size(layer["windows_bytes"]),
        ]
        for layer in layers
    ]
    out.print(table(["LAYER", "INDEX", "PACKED", "WINDOWS"], cells))


def _show_file(path: Path, as_json: bool) -> None:
    index = finish(_opened(path))
    document = {
        "file": str(path),
        "layer": str(index.layer),
        "diff_id": str(index.diff_id),
        "compression": index.compression.value,
        "layer_bytes": index.blob_bytes,
        "plain_bytes": index.view_bytes,
        "entries": index.entry_count,
        "chunks": index.chunk_count,
        "checkpoints": index.checkpoint_count,
        "longest_run_bytes": index.longest_run_bytes,
        "index_bytes": len(index.data),
        "windows_bytes": index.windows_bytes,
        "needs_chain": index.needs_chain,
    }
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        typer.echo(f"{name.replace('_', ' ')}: {value}")


async def _opened(path: Path) -> LayerIndex:
    return LayerIndex.open(path)
