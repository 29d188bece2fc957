"""Pushing to a registry: blobs and manifests, into one repository at one host.

distribution-spec 1.1, "Push". A blob is asked for first, then mounted from another repository,
then uploaded: whole if it is small or the registry wants it so, else piece by piece, so that
memory stays bounded. An upload that broke is begun anew. No credential goes where a Location leads
away from the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import (
    CorruptError,
    DeadlineError,
    EmberError,
    InvalidArgumentError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from snapshotter.oci.answers import error_for
from snapshotter.oci.asking import Asker, request_at
from snapshotter.oci.documents import digest_of
from snapshotter.oci.exchange import Request, Response, origin_of, without_query
from snapshotter.oci.hosts import Host, is_local
from snapshotter.oci.reference import Reference
from snapshotter.oci.retry import Patience, retrying

T = TypeVar("T")

WHOLE_LIMIT_BYTES = 32 * 1024 * 1024
"""What is longer goes in pieces of this length."""
PATIENCE = Patience(attempts=5, first_pause_s=0.5, longest_pause_s=60.0)

_PIECE_BYTES = 4 * 1024 * 1024
_FOUND = (200, 301, 302, 303, 307, 308)
"""Of a HEAD: a redirect to storage says too that the blob is there."""
_TAKE_LESS = (413,)
_NO_PIECES = (404, 405, 416, 501)
_PASSING = (401, 403, 404, 408, 425)
_OCTETS = {"Content-Type": "application/octet-stream"}


class Body(Protocol):
    """Bytes to push, of a known length, that can be read more than once."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; in any thread, for it may block."""
        ...


@dataclass(frozen=True, slots=True)
class BytesBody:
    """A Body in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


@dataclass(frozen=True, slots=True)
class Pushed:
    """A manifest that is there now; ``subject_known``: the registry lists it as a referrer."""

    digest: Digest
    subject_known: bool


@dataclass(frozen=True, slots=True)
class UploadPace:
    """How long a request may take: ``answer_s``, and its body's bytes at the slowest rate."""

    answer_s: float = 90.0
    slowest_bytes_per_s: float = 50_000

    def limit_s(self, body_bytes: int) -> float:
        return self.answer_s + body_bytes / self.slowest_bytes_per_s


class Pusher:
    """Pushes into the repository of a reference; made for several callers at once."""

    def __init__(
        self,
        asker: Asker,
        target: Reference,
        clock: Clock,
        patience: Patience = PATIENCE,
        *,
        pace: UploadPace | None = None,
    ) -> None:
        """Push to the registry of ``target`` itself, or to the first mirror that takes pushes if
        hosts.toml lets the registry have none. InvalidArgumentError if nobody takes any."""
        hosts = asker.book.hosts(target.registry, "push")
        if not hosts:
            raise InvalidArgumentError(f"{target.name}: hosts.toml names no host to push to")
        self.asker = asker
        self.target = target
        self.clock = clock
        self.host: Host = next((host for host in hosts if host.is_server), hosts[0])
        self._patience = patience
        self._pace = pace or UploadPace()

    async def blob(self, digest: Digest, body: Body, mount_from: str | None = None) -> bool:
        """Have ``body`` in the repository as ``digest``; False if it was there already.

        ``mount_from`` is another repository of this registry that has it. Raises
        UnauthorizedError, RefusedError (the registry will not take it) and UnavailableError.
        """
        return await self.patiently(lambda: self._blob(digest, body, mount_from))

    async def manifest(self, identifier: str, data: bytes, media_type: str) -> Pushed:
        """Put a manifest under a tag or its digest; raises as `blob` does."""
        return await self.patiently(lambda: self._manifest(identifier, data, media_type))

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """``work``, again if it may help, not oftener and not sooner than the registry wants."""
        return await retrying(work, self.clock, self._patience)

    async def _manifest(self, identifier: str, data: bytes, media_type: str) -> Pushed:
        request = self._request(f"manifests/{identifier}", {"Content-Type": media_type})
        response = await self._send(replace(request, method="PUT", body=data))
        if response.status not in (200, 201, 202):
            raise await _refusal(response, request)
        told = response.headers.get("Docker-Content-Digest", "").strip()
        subject = response.headers.get("OCI-Subject", "").strip()
        await response.close()
        digest = digest_of(data)
        if told and told != str(digest):
            raise CorruptError(f"{self.target.name}: {digest} was pushed, {told[:100]!r} arrived")
        return Pushed(digest, bool(subject))

    async def _blob(self, digest: Digest, body: Body, mount_from: str | None) -> bool:
        request = replace(self._request(f"blobs/{digest}", {}), method="HEAD")
        response = await self._send(request)
        await response.close()
        if response.status in _FOUND:
            return False
        if response.status != 404:
            raise UnavailableError(f"{request.url}: answered {response.status}")
        location = await self._begin(digest, mount_from)
        if location is None:
            return True
        if body.size_bytes > WHOLE_LIMIT_BYTES:
            if await self._in_pieces(digest, body, location, WHOLE_LIMIT_BYTES):
                return True
            location = await self._begin(digest, None) or location
        if await self._whole(digest, body, location):
            return True
        location = await self._begin(digest, None) or location
        if not await self._in_pieces(digest, body, location, _PIECE_BYTES):
            raise RefusedError(
                f"{self.target.name}: {self.host.authority} takes blob {digest} neither whole nor"
                " in pieces"
            )
        return True

    async def _begin(self, digest: Digest, mount_from: str | None) -> str | None:
        """Where to upload to; None if the blob could be mounted."""
        query = {} if mount_from is None else {"mount": str(digest), "from": mount_from}
        request = self._request("blobs/uploads/", {}, query)
        response = await self._send(replace(request, method="POST", body=b""))
        if response.status == 201 and mount_from is not None:
            await response.close()
            return None
        if response.status != 202:
            raise await _refusal(response, request)
        return await self._located(request, response)

    async def _whole(self, digest: Digest, body: Body, location: str) -> bool:
        """Upload in one request; False if that is too much for the registry at once."""
        data = await asyncio.to_thread(body.read, 0, body.size_bytes)
        response = await self._send(self._put(location, digest, data))
        if response.status in _TAKE_LESS:
            await response.close()
            return False
        if response.status not in (201, 204):
            raise await _refusal(response, self._put(location, digest, b""))
        await response.close()
        return True

    async def _in_pieces(self, digest: Digest, body: Body, location: str, piece: int) -> bool:
        """Upload piece by piece; False if the registry has no such thing."""
        offset = 0
        while offset < body.size_bytes:
            length = min(piece, body.size_bytes - offset)
            data = await asyncio.to_thread(body.read, offset, length)
            end = offset + len(data) - 1
            headers = {**_OCTETS, "Content-Range": f"{offset}-{end}"}
            request = replace(self._at(location, headers), method="PATCH", body=data)
            response = await self._send(request)
            if response.status in (*_NO_PIECES, *_TAKE_LESS):
                await response.close()
                return False
            if response.status not in (202, 204):
                raise await _refusal(response, request)
            offset += len(data)
            location = await self._located(request, response)
        request = self._put(location, digest, b"")
        response = await self._send(request)
        if response.status not in (201, 204):
            raise await _refusal(response, request)
        await response.close()
        return True

    def _put(self, location: str, digest: Digest, data: bytes) -> Request:
        parts = urlsplit(location)
        fields = [*parse_qsl(parts.query, keep_blank_values=True), ("digest", str(digest))]
        url = urlunsplit(parts._replace(query=urlencode(fields, safe="/:")))
        return replace(self._at(url, dict(_OCTETS)), method="PUT", body=data)

    def _request(
        self, path: str, headers: dict[str, str], query: dict[str, str] | None = None
    ) -> Request:
        target = self.target
        request = request_at(self.host, target.registry, target.repository, path, headers, query)
        return replace(request, keep_redirect=False)

    def _at(self, location: str, headers: dict[str, str]) -> Request:
        at_home = origin_of(location) == origin_of(self.host.base)
        return replace(self._request("", headers).to(location, at_home=at_home))

    async def _send(self, request: Request) -> Response:
        """The head of the answer. DeadlineError if the other side takes the body too slowly."""
        limit_s = self._pace.limit_s(len(request.body or b""))
        try:
            async with asyncio.timeout(limit_s):
                return await self.asker.sender.send(request)
        except TimeoutError:
            where = without_query(request.url)
            raise DeadlineError(f"push to {where}: no answer in {limit_s:.0f} s") from None

    async def _located(self, request: Request, response: Response) -> str:
        """Where the upload goes on. A registry behind a proxy that ends TLS may not know its own
        scheme and port; what it calls by its own name is where it was reached."""
        told = response.headers.get("Location", "")
        await response.close()
        where = f"upload to {without_query(request.url)}"
        try:
            url = urljoin(request.url, told.strip())
            parts, home = urlsplit(url), urlsplit(self.host.base)
            if parts.hostname == home.hostname and (parts.port or "") in (home.port or "", ""):
                parts = parts._replace(scheme=home.scheme, netloc=home.netloc)
            elif parts.scheme == "http" and not self.host.is_plain and not is_local(parts.netloc):
                raise UnavailableError(f"{where}: it leaves TLS for {parts.hostname}")
        except ValueError:
            raise UnavailableError(f"{where}: no usable Location") from None
        usable = told and parts.scheme in ("http", "https") and parts.username is None
        if not usable or not parts.hostname:
            raise UnavailableError(f"{where}: no usable Location")
        return urlunsplit(parts._replace(fragment=""))


async def _refusal(response: Response, request: Request) -> EmberError:
    """What a refused push means: what the registry will not take now, it will not take later."""
    status = response.status
    error = await error_for(response, f"push to {without_query(request.url)}")
    if isinstance(error, NotFoundError):
        return UnavailableError(str(error))  # an upload that it has forgotten is begun anew
    if 400 <= status < 500 and status not in _PASSING:
        return RefusedError(str(error))
    return error
