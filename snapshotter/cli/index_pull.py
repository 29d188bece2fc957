"""`ember index pull`: an image's indexes as files, as a node keeps them.

Only what a trusted key signed is taken, unless it is said that anything may be.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import typer

from snapshotter.cli.index_work import finish, platform_of, registry, short, trusted
from snapshotter.cli.screen import several
from snapshotter.config import Config
from snapshotter.errors import ConfigError, NotFoundError, RefusedError
from snapshotter.indexes.cache import refuse_a_nodes
from snapshotter.indexes.fetched import fetch_into
from snapshotter.indexes.find import Findings, Found, find
from snapshotter.oci.reference import Reference, parse_reference
from snapshotter.tasks import together

_AT_ONCE = 4


def run(
    config: Config,
    image: str,
    platform: str,
    output: Path,
    keys: tuple[Path, ...],
    unsigned: bool,
    as_json: bool,
) -> None:
    """Fetch, and say what came."""
    found, paths = finish(_pull(config, image, platform, output, keys, unsigned))
    if as_json:
        document = {
            "image": image,
            "manifest": str(found.artifact.image.digest),
            "platform": str(found.artifact.platform),
            "artifact": str(found.digest),
            "trusted_key": found.key_id,
            "files": [str(path) for path in paths],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    signed = f"signed by {short(found.key_id)}" if found.key_id else "NOT trusted: " + found.refusal
    typer.echo(f"{image}: indexes of {several(len(paths), 'layer')} in {output}, {signed}")


async def _pull(
    config: Config,
    image: str,
    platform: str,
    output: Path,
    keys: tuple[Path, ...],
    unsigned: bool,
) -> tuple[Found, list[Path]]:
    ring = trusted(config, keys)
    reference = parse_reference(image)
    refuse_a_nodes(output, "--output")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    async with registry(config) as client:
        resolved = await client.resolve(reference, platform_of(platform))
        pinned = reference.with_digest(resolved.manifest_digest)
        found = chosen(await find(client, pinned, ring), pinned, unsigned)
        distinct = {layer.digest: layer for layer in resolved.layers}.values()
        known = [layer for layer in distinct if found.artifact.layer(layer.digest) is not None]
        works = [partial(fetch_into, client, found, layer, output) for layer in known]
        return found, await together(works, _AT_ONCE)


def chosen(findings: Findings, image: Reference, unsigned: bool) -> Found:
    """The artifact to use; an error with the reasons if there is none."""
    if not findings.found and not findings.refused:
        raise NotFoundError(f"{image} has no index artifact; `ember index build` makes one")
    found = findings.signed or (findings.found[0] if unsigned and findings.found else None)
    if found is None:
        raise RefusedError(
            f"{image}: no index artifact that may be trusted ({findings.reasons}); --key names "
            "another key"
        )
    return found
