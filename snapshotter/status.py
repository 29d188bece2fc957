"""The status document: what is here, how much of each image, who brought it, and why not lazy.

Looks and changes nothing. What has to be read from the disk is read in another thread, and
thousands of images take turns with whatever else the daemon has to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from snapshotter import __version__
from snapshotter.chunks.store import StoredView, ViewStore
from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import (
    EmberError,
)
from snapshotter.fetch import Road
from snapshotter.imagefs.catalog import Catalog, Image, Layer
from snapshotter.imagefs.datapath import DataPath
from snapshotter.imagefs.decision import NO_INDEX, NO_LABELS, Decider
from snapshotter.imagefs.foreign import ForeignIndexes
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.misses import MissPump
from snapshotter.imagefs.provenance import Provenance
from snapshotter.imagefs.removal import Remover
from snapshotter.imagefs.shelf import Glance, Shelf
from snapshotter.imagefs.verdicts import Verdicts
from snapshotter.imagefs.views import Views
from snapshotter.imagefs.warm import Warmer
from snapshotter.indexes.keys import Keyring
from snapshotter.oci.registry import RegistryClient
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.forgotten import Forgotten
from snapshotter.rpc.image_records import every_record
from snapshotter.rpc.leases import PullLeases

WRONG_NOTED = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """The daemon's parts, as far as operators' questions concern them."""

    catalog: Catalog
    shelf: Shelf
    ingest: Ingest
    mounts: LayerMounts
    views: Views
    remover: Remover
    decider: Decider
    foreign: ForeignIndexes
    verdicts: Verdicts
    warmer: Warmer
    store: ViewStore
    road: Road
    misses: MissPump | None
    data_path: DataPath
    containerd: Containerd
    leases: PullLeases
    forgotten: Forgotten
    registry: RegistryClient
    snapshotter: str
    engine: tuple[str, str]
    clock: Clock
    started_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was looked up once for a whole status document."""

    here: dict[Digest, StoredView]
    indexes: dict[Digest, Glance]
    running: dict[str, list[str]]
    suspect: dict[Digest, list[str]]
    held: dict[str, set[str]] | None
    ring: Keyring


async def status_document(parts: Parts) -> dict[str, Any]:
    """The status document; docs/commands.md says what each field means."""
    path = parts.data_path
    blobs = {layer.blob for image in parts.catalog.images() for layer in image.layers}
    seen = _Seen(
        {stored.view: stored for stored in await parts.store.stored()},
        await asyncio.to_thread(parts.shelf.glance, blobs),
        await containers(parts),
        await parts.mounts.doubted(),
        await _held(parts),
        await asyncio.to_thread(parts.foreign.trust.keys.read),
    )
    images = []
    for image in list(parts.catalog.images()):
        images.append(_image(parts, image, seen))
        await asyncio.sleep(0)  # of thousands, none may hold up the others' calls
    return {
        "daemon": {
            "version": __version__,
            "pid": os.getpid(),
            "up_s": round(parts.clock.monotonic_s() - parts.started_s, 3),
            "data_path": {"name": path.name, "reasons": list(path.reasons)},
            "engine": {"name": parts.engine[0], "reason": parts.engine[1]},
            "keeper": path.keeper_text(),
            "keeper_losses": path.keeper_losses,
            "index": _trust(parts, seen.ring),
        },
        "images": images,
        "indexing": [
            {
                "layer": str(job.blob.digest),
                "percent": job.percent,
                "size_bytes": job.blob.size_bytes,
                "quiet_s": round(job.quiet_s, 3),
            }
            for job in parts.ingest.jobs()
        ],
        "misses": asdict(parts.misses.counts) if parts.misses else _NO_MISSES,
        "waiting": _waiting(parts),
        "guard": asdict(path.guard.counts()) if path.guard else None,
        "tiers": _bytes_by_tier(parts),
        "notes": _notes(parts),
    }


def _trust(parts: Parts, ring: Keyring) -> dict[str, Any]:
    """Whose indexes are used, and how looking for them went since the daemon's start."""
    trust, lookup = parts.foreign.trust, parts.foreign.lookup
    return {
        "trust": trust.mode,
        "trusted_keys": str(trust.keys.directory),
        "keys": sorted(ring.keys),
        "problems": list(ring.problems),
        "lookups": [
            {"outcome": outcome, "count": count}
            for outcome, count in sorted(lookup.counts.items() if lookup is not None else ())
        ],
        "wrong": [
            {
                "layer": str(wrong.layer),
                "artifact": str(wrong.artifact or ""),
                "repository": wrong.repository,
                "reason": wrong.reason,
            }
            for wrong in parts.verdicts.wrong()
        ],
    }


def _waiting(parts: Parts) -> list[dict[str, Any]]:
    reads = parts.misses.waiting.now() if parts.misses else []
    return [
        {
            "view": str(one.view),
            "reads": one.count,
            "longest_s": round(one.longest_s, 3),
            "offset": one.extent.offset,
            "length": one.extent.length,
            "why": one.why,
        }
        for one in reads
    ]


def _notes(parts: Parts) -> list[str]:
    notes = [parts.forgotten.note] if parts.forgotten.note else []
    notes += parts.foreign.trust.notes()
    for wrong in parts.verdicts.wrong()[:WRONG_NOTED]:
        notes.append(
            f"an index of layer {wrong.layer} {wrong.source} was WRONG"
            f" ({wrong.reason}){wrong.consequence}"
        )
    count = parts.decider.unlabelled
    if count:
        notes.append(f"{count} layers were unpacked as plain overlay: {NO_LABELS}")
    return notes


def _bytes_by_tier(parts: Parts) -> dict[str, int]:
    total: Counter[str] = Counter()
    images = parts.catalog.images()
    for view in {layer.diff_id for image in images for layer in image.layers}:
        total += _brought(parts, view)
    return dict(total)


def _brought(parts: Parts, view: Digest) -> Counter[str]:
    """Stored bytes that each tier has brought of a view, first pulls included."""
    first = parts.ingest.streamed_bytes(view)
    brought = Counter(parts.road.tally(view).bytes_by_tier)
    if first:
        brought["registry"] += first
    return brought


async def _held(parts: Parts) -> dict[str, set[str]] | None:
    """By name and by digest, the namespaces that hold an image; None if containerd is silent."""
    found: dict[str, set[str]] = {}
    with contextlib.suppress(EmberError):
        for record in await every_record(parts.containerd):
            for key in (record.name, record.target):
                found.setdefault(key, set()).add(record.namespace)
        return found
    return None


async def containers(parts: Parts) -> dict[str, list[str]]:
    """Image name → containers on this snapshotter; empty if containerd does not answer."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(EmberError):
        for namespace in await parts.containerd.namespaces():
            for container, image in await parts.containerd.containers(namespace, parts.snapshotter):
                found.setdefault(image, []).append(f"{namespace}/{container}")
    return found


def _image(parts: Parts, image: Image, seen: _Seen) -> dict[str, Any]:
    layers = [_layer(parts, image, layer, seen) for layer in image.layers]
    whole = all(layer["view_bytes"] for layer in layers)  # 0: not known before its index
    named = [c for name in image.names for c in seen.running.get(name, ())]
    doubtful = [str(layer.blob) for layer in image.layers if layer.blob in seen.suspect]
    users = sorted({c for layer in image.layers for c in seen.suspect.get(layer.blob, ())})
    return {
        "names": list(image.names),
        "manifest": str(image.manifest),
        "lazy": image.lazy,
        "reason": _reason(image, layers),
        "suspect": _suspicion(parts, doubtful, users),
        "suspect_containers": users,
        "leaving": image.leaving,
        "lookup": _lookup(parts, image),
        "namespaces": _namespaces(image, seen.held),
        "here_bytes": sum(layer["here_bytes"] for layer in layers),
        "plain_bytes": sum(layer["view_bytes"] for layer in layers) if whole else 0,
        "size_bytes": sum(layer.size_bytes for layer in image.layers),
        "containers": named,
        "layers": layers,
    }


def _reason(image: Image, layers: list[dict[str, Any]]) -> str:
    """Why it is not lazy; what was decided at its pull may have been made up for since."""
    if image.reason.startswith(NO_INDEX) and all(each["state"] == "indexed" for each in layers):
        return (
            "it was pulled as a plain overlay and indexed afterwards: lazy when it is removed and"
            " pulled again"
        )
    return image.reason


def _lookup(parts: Parts, image: Image) -> dict[str, str] | None:
    """How looking for an index beside the image ended the last time; None: it never was."""
    last = parts.foreign.last(image.manifest)
    return None if last is None else {"outcome": last.found.value, "why": last.why}


def _index_from(
    parts: Parts, image: Image, provenance: Provenance, ring: Keyring
) -> dict[str, Any]:
    """Who made the index of a layer of the image, and why it is not used any more, if so."""
    places = image.repositories or ("",)
    faults = [parts.foreign.trust.fault(provenance, place, ring) for place in places]
    return {
        "origin": provenance.origin.value,
        "key": provenance.key,
        "artifact": str(provenance.artifact or ""),
        "repositories": list(provenance.repositories),
        "compared": provenance.compared,
        "fault": "" if None in faults else faults[0],
    }


def _namespaces(image: Image, held: dict[str, set[str]] | None) -> list[str] | None:
    """Where containerd has the image."""
    if held is None:
        return None
    return sorted({n for key in (*image.names, str(image.manifest)) for n in held.get(key, ())})


def _layer(parts: Parts, image: Image, layer: Layer, seen: _Seen) -> dict[str, Any]:
    index = seen.indexes.get(layer.blob)
    stored = seen.here.get(layer.diff_id)
    job = parts.ingest.job(layer.blob, layer.diff_id)
    if index is not None:
        state = "indexed"
    elif job is not None and not job.finished.is_set():
        state = f"being indexed, {job.percent} %"
        state += f", nothing has come for {job.quiet_s:.0f} s" if job.quiet_s else ""
    else:
        state = parts.catalog.fault(layer.blob, layer.diff_id) or (
            str(job.error) if job else "no index"
        )
    here_bytes = 0
    if stored is not None:
        chunk_bytes = -(-stored.length_bytes // max(1, stored.chunk_count))
        here_bytes = min(stored.length_bytes, stored.readable_count * chunk_bytes)
    return {
        "digest": str(layer.blob),
        "diff_id": str(layer.diff_id),
        "size_bytes": layer.size_bytes,
        "view_bytes": index.view_bytes if index else 0,
        "here_bytes": here_bytes,
        "index_bytes": index.disk_bytes if index else 0,
        "index_from": _index_from(parts, image, index.provenance, seen.ring) if index else None,
        "tiers": dict(_brought(parts, layer.diff_id)),
        "state": state,
        "trouble": parts.road.tally(layer.diff_id).trouble,
    }


_NO_MISSES = {"asked": 0, "filled": 0, "failed": 0, "waited_s": 0.0, "longest_s": 0.0}


def _suspicion(parts: Parts, layers: list[str], users: list[str]) -> str:
    if not layers:
        return ""
    wrong = next((w for w in map(parts.verdicts.of_layer, map(Digest.parse, layers)) if w), None)
    if wrong is not None:
        return (
            f"it was mounted by an index from {wrong.repository} that turned out wrong"
            f" ({wrong.reason}); restart its containers {', '.join(users)}"
            f" (layers {', '.join(layers)})"
        )
    return (
        "the guard was gone while this was mounted, so what was read then may have been zeros;"
        f" restart its containers {', '.join(users)} (layers {', '.join(layers)})"
    )
