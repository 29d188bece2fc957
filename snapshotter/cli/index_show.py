"""`ember index show`: the artifacts of an image, those of an OCI layout, or one index file.

What is shown was checked as far as reading it goes; `verify` checks all of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from snapshotter.cli.index_work import finish, platform_of, registry, short, trusted
from snapshotter.cli.screen import console, several, size, table
from snapshotter.config import Config
from snapshotter.image.index import LayerIndex
from snapshotter.indexes.artifact import ARTIFACT_TYPE, IndexArtifact, parse_artifact
from snapshotter.indexes.find import find
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
        rows = finish(_in_layout(path))
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
    async with registry(config) as client:
        resolved = await client.resolve(reference, platform_of(platform))
        pinned = reference.with_digest(resolved.manifest_digest)
        findings = await find(client, pinned, ring, every=True)
    rows = [
        {
            **document_of(found.artifact),
            "artifact": str(found.digest),
            "trusted_key": found.key_id,
            "key_name": ring.names.get(found.key_id or "", ""),
            "why_not_trusted": found.refusal,
        }
        for found in findings.found
    ]
    return rows + [{"refused": reason} for reason in findings.refused]


async def _in_layout(path: Path) -> list[dict[str, Any]]:
    """The index artifacts that an OCI layout lists."""
    source = LayoutSource(Directory(path))
    rows = []
    for entry in await source.entries():
        if entry.artifact_type == ARTIFACT_TYPE:
            data = await source.blob_of(entry)
            artifact = parse_artifact(data, f"{path}: {entry.digest}")
            rows.append({**document_of(artifact), "artifact": str(entry.digest)})
    return rows


def document_of(artifact: IndexArtifact) -> dict[str, Any]:
    """An artifact for scripts."""
    return {
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
    }


def trust_of(row: dict[str, Any]) -> str:
    """In a few words, who stands for an artifact."""
    if row.get("trusted_key"):
        return f"signed by {short(row['trusted_key'])} {row.get('key_name', '')}".strip()
    if row.get("why_not_trusted"):
        return f"not trusted: {row['why_not_trusted']}"
    return "signed" if row.get("signed") else "not signed"


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
