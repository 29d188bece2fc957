"""Attaching a manifest to the image it refers to, also where the registry knows no referrers.

Then the index under the fallback tag is read, merged and put (distribution-spec 1.1, "Pushing
Manifests with Subject"). Nothing there locks: two that push at once overwrite each other, so each
stays until its entry has outlived the time that another may have needed from reading to putting.
"""

from __future__ import annotations

import json
import random
from typing import Any

from snapshotter.errors import RefusedError, UnavailableError
from snapshotter.oci.documents import OCI_INDEX, OCI_MANIFEST, Descriptor, objects
from snapshotter.oci.pushing import Pusher
from snapshotter.oci.reference import Reference
from snapshotter.oci.referrers import LIST_LIMIT_BYTES, fallback_tag, read_fallback_index

ROUND_LIMIT = 12
_SETTLE_S = 1.0
_SETTLE_ROUNDS = 4
"""For so many of our own rounds another's may last, and is still noticed."""


async def attach(pusher: Pusher, image: Reference, data: bytes, entry: Descriptor) -> None:
    """Push the manifest ``data`` (its descriptor is ``entry``), which refers to ``image``, so that
    it is listed as a referrer. Raises as `Pusher.blob`, RefusedError if something else has the
    fallback tag."""
    pushed = await pusher.manifest(str(entry.digest), data, OCI_MANIFEST)
    if not pushed.subject_known:
        await _list_under_tag(pusher, image, entry)


async def _list_under_tag(pusher: Pusher, image: Reference, entry: Descriptor) -> None:
    assert image.digest is not None
    digest, tag = image.digest, fallback_tag(image.digest)
    what = f"referrers of {image.name}@{digest} (tag {tag})"
    for _ in range(ROUND_LIMIT):
        began_s = pusher.clock.monotonic_s()
        document = await pusher.patiently(
            lambda: read_fallback_index(pusher.asker, pusher.host, image, digest)
        )
        entries = objects(document, "manifests", what)
        if any(known.get("digest") == str(entry.digest) for known in entries):
            return
        await pusher.manifest(tag, _merged(document, entries, entry, what), OCI_INDEX)
        round_s = pusher.clock.monotonic_s() - began_s
        pause_s = max(_SETTLE_S, _SETTLE_ROUNDS * round_s) * random.uniform(1.0, 1.5)
        await pusher.clock.sleep(pause_s)
    raise UnavailableError(
        f"{what}: others overwrote our entry {ROUND_LIMIT} times; push again when they are done"
    )


def _merged(
    document: dict[str, Any], entries: list[dict[str, Any]], entry: Descriptor, what: str
) -> bytes:
    index = {**document, "mediaType": OCI_INDEX, "manifests": [*entries, entry.listed]}
    data = json.dumps(index, separators=(",", ":")).encode()
    if len(data) > LIST_LIMIT_BYTES:
        raise RefusedError(f"{what}: the list is full; remove entries that nobody needs")
    return data
