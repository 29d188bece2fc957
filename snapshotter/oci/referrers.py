"""What refers to an image: the referrers API, and the tag that stands for it in old registries.

distribution-spec 1.1, "Listing Referrers" and "Referrers Tag Schema". What a registry says is a
hint where to look: entries are filtered again here, bounded in number and pages, and whoever uses
one holds it to its digest and to the image that it should refer to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urljoin

from snapshotter.content import Digest
from snapshotter.errors import NotFoundError, RefusedError
from snapshotter.oci.answers import error_for
from snapshotter.oci.asking import Asker, request_at
from snapshotter.oci.credentials import Wanted
from snapshotter.oci.documents import (
    MANIFEST_TYPES,
    OCI_INDEX,
    Descriptor,
    objects,
    parse_descriptor,
    parse_object,
    text_of,
)
from snapshotter.oci.exchange import Request, Response, origin_of, read_body
from snapshotter.oci.hosts import Host
from snapshotter.oci.reference import Reference

LIST_LIMIT_BYTES = 4 * 1024 * 1024
"""Of all pages of a list together."""
REFERRER_LIMIT = 1024
"""So many entries are looked at; of a type rarely more than a few exist."""

_PAGE_LIMIT = 16
_NO_API = (400, 404, 405, 406, 410, 501)
"""Answers of registries that don't know the API, or take its path for something else."""

_UNTOLD = ("", "application/vnd.oci.empty.v1+json")
"""What old tools and registries give as the type of an artifact that has an empty config."""

_NEXT = re.compile(r'<([^<>\s]{1,4096})>\s*;(?:[^,]*;)?\s*rel="?next"?', re.ASCII)


def fallback_tag(digest: Digest) -> str:
    """The tag whose index lists what refers to ``digest`` (spec, "Referrers Tag Schema")."""
    return f"{digest.algorithm[:32]}-{digest.hex[:64]}"


async def list_referrers(asker: Asker, image: Reference, artifact_type: str) -> list[Descriptor]:
    """What refers to ``image``, of ``artifact_type``; empty if nothing does.

    Entries that don't tell their type (old tools and registries write such) come last. Hosts that
    may be asked for referrers are asked until one has some, then those that may only resolve, for
    the tag. Raises as `RegistryClient.manifest`, and RefusedError if what came is no list.
    """
    assert image.digest is not None
    what = f"referrers of {image.name}@{image.digest}"
    lister = _Lister(asker, image, image.digest, artifact_type, what)
    hosts = asker.book.hosts(image.registry, "referrers")
    hosts += [host for host in asker.book.hosts(image.registry, "resolve") if host not in hosts]
    wanted = Wanted(image.registry, image.repository)
    try:
        return await asker.soonest(hosts, wanted, None, lister.list_at, what)
    except NotFoundError:
        return []


class _Lister:
    """One listing; the same for each host."""

    def __init__(
        self, asker: Asker, image: Reference, digest: Digest, artifact_type: str, what: str
    ) -> None:
        self._asker = asker
        self._image = image
        self._digest = digest
        self._type = artifact_type
        self._what = what

    async def list_at(self, host: Host) -> list[Descriptor]:
        """The entries at ``host``; NotFoundError if it has none, so that others are asked."""
        entries = await self._by_api(host) if "referrers" in host.capabilities else None
        if entries is None:
            entries = await read_fallback(self._asker, host, self._image, self._digest)
        found = _filtered(entries, self._type)
        if not found:
            raise NotFoundError(f"{self._what}: none of type {self._type} at {host.authority}")
        return found

    async def _by_api(self, host: Host) -> list[Descriptor] | None:
        """All pages; None if the host has no such API."""
        query = {"artifactType": self._type}
        request = _request(host, self._image, f"referrers/{self._digest}", query)
        entries: list[Descriptor] = []
        left_bytes = LIST_LIMIT_BYTES
        for page in range(_PAGE_LIMIT):
            response = await self._asker.sender.send(request)
            if page == 0 and _is_no_list(response):
                await response.close()
                return None
            link = _next_page(request, response)
            document, size_bytes = await _index(response, request, self._what, left_bytes)
            entries += _parsed(document, self._what)
            left_bytes -= size_bytes
            if link is None or len(entries) >= REFERRER_LIMIT:
                break
            request = replace(request, url=link)
        return entries[:REFERRER_LIMIT]


async def read_fallback(
    asker: Asker, host: Host, image: Reference, digest: Digest
) -> list[Descriptor]:
    """The entries of the index under the fallback tag at ``host``; empty if there is none."""
    raw = await read_fallback_index(asker, host, image, digest)
    what = f"referrers of {image.name}@{digest} (tag {fallback_tag(digest)})"
    return _parsed(raw, what)[:REFERRER_LIMIT]


async def read_fallback_index(
    asker: Asker, host: Host, image: Reference, digest: Digest
) -> dict[str, Any]:
    """That index as it is, with the words of other tools in it; without entries if there is none.

    Raises RefusedError if something else has the tag.
    """
    what = f"referrers of {image.name}@{digest} (tag {fallback_tag(digest)})"
    request = _request(host, image, f"manifests/{fallback_tag(digest)}", {})
    response = await asker.sender.send(request)
    if response.status in (404, 410):
        await response.close()
        return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    document, _ = await _index(response, request, what, LIST_LIMIT_BYTES)
    return document


def _request(host: Host, image: Reference, path: str, query: dict[str, str]) -> Request:
    return request_at(host, image.registry, image.repository, path, {"Accept": OCI_INDEX}, query)


def _is_no_list(response: Response) -> bool:
    """Whether the answer comes from something that has no such API: a portal's page, say."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return response.status in _NO_API or (response.status == 200 and kind == "text/html")


async def _index(
    response: Response, request: Request, what: str, limit_bytes: int
) -> tuple[dict[str, Any], int]:
    """The image index in an answer, its entries not looked at, and its length.

    RefusedError if that is over ``limit_bytes``, what is left of LIST_LIMIT_BYTES.
    """
    if response.status != 200:
        raise await error_for(response, request.url)
    body = await read_body(response, limit_bytes)
    if body is None:
        raise RefusedError(f"{what}: a list longer than {LIST_LIMIT_BYTES} bytes")
    document = parse_object(body, what)
    if document.get("schemaVersion") != 2 or "manifests" not in document:
        raise RefusedError(f"{what}: what came is no image index")
    if text_of(document, "mediaType", what) not in ("", OCI_INDEX):
        raise RefusedError(f"{what}: what came is not of type {OCI_INDEX}")
    return document, len(body)


def _parsed(document: dict[str, Any], what: str) -> list[Descriptor]:
    return [parse_descriptor(entry, what) for entry in objects(document, "manifests", what)]


def _next_page(request: Request, response: Response) -> str | None:
    """Where the list goes on: only at the same place, for the request has its secrets with it."""
    match = _NEXT.search(response.headers.get("Link", ""))
    if match is None:
        return None
    try:
        url = urljoin(request.url, match[1])
        at_home = origin_of(url) == origin_of(request.url)
    except ValueError:
        return None
    return url if at_home and url != request.url else None


def _filtered(entries: Sequence[Descriptor], artifact_type: str) -> list[Descriptor]:
    """Manifests of this type, each once; those of no type last."""
    seen: dict[Digest, Descriptor] = {}
    for entry in entries:
        if entry.media_type in MANIFEST_TYPES and entry.artifact_type in (artifact_type, *_UNTOLD):
            seen.setdefault(entry.digest, entry)
    return sorted(seen.values(), key=lambda entry: entry.artifact_type in _UNTOLD)
