"""The registry client: manifests, whole blobs and exact ranges, from the first host that has them.

Documents are held to their digest here; blobs to their length here and to their digest by the
caller, who tells `suspect` when it failed. A read is one try over all hosts: how often to try,
and for how long, is the caller's affair.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    EmberError,
    InvalidArgumentError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
    restated,
)
from snapshotter.oci.answers import error_for, expect_range, expect_whole
from snapshotter.oci.auth import AuthorizingSender
from snapshotter.oci.credentials import Credential, Login, MemoryCredentials, Wanted
from snapshotter.oci.documents import ACCEPT, DOCUMENT_LIMIT_BYTES, check_content, digest_of
from snapshotter.oci.exchange import Request, Response, read_body
from snapshotter.oci.headstart import first_success
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.hosts import Host
from snapshotter.oci.manifest import parse_manifest
from snapshotter.oci.platform import Platform
from snapshotter.oci.recollection import Recollection
from snapshotter.oci.reference import Reference, split_name
from snapshotter.oci.resolver import FetchedManifest, ResolvedImage, resolve_image
from snapshotter.oci.retry import Patience, retrying
from snapshotter.oci.streaming import BlobStream, exactly, name_of

T = TypeVar("T")

_DOCUMENT_DEADLINE_S = 60.0
_HEAD_START_S = 1.0


class RegistryClient:
    """Reads images from registries; made for many callers at once.

    ``insist`` lets each place that asked for quiet be asked once in spite of it.
    """

    def __init__(
        self,
        sender: AuthorizingSender,
        book: HostBook,
        clock: Clock,
        *,
        given: MemoryCredentials,
        on_close: Callable[[], Awaitable[None]],
        insist: Callable[[], None],
        patience: Patience | None = None,
    ) -> None:
        self._sender = sender
        self._book = book
        self._clock = clock
        self._given = given
        self._on_close = on_close
        self.insist = insist
        self._patience = patience or Patience()
        self._served: Recollection[tuple[str, Digest], Host] = Recollection(clock, 3600)

    async def close(self) -> None:
        """Close the connections beneath; reads under way fail."""
        await self._on_close()

    async def resolve(
        self, reference: Reference, platform: Platform, credential: Credential | None = None
    ) -> ResolvedImage:
        """The manifest, config and layers of ``reference`` for ``platform``, all verified.

        ``credential`` is tried before all others, and kept in memory for later reads of the
        repository. Raises NotFoundError (no such image, or none for this platform),
        UnauthorizedError, RefusedError (not an image that can be used), ConfigError (hosts.toml),
        and, after a few tries, CorruptError and UnavailableError.
        """
        if credential is not None:
            self._given.put(str(reference), credential)
        return await retrying(
            lambda: resolve_image(self, reference, platform), self._clock, self._patience
        )

    def login(self, reference: Reference) -> Login | None:
        """What the registry of ``reference`` itself (no mirror) let in last for its repository;
        None if it wanted none. To be asked after a `resolve`."""
        for host in self._book.hosts(reference.registry, "resolve"):
            if host.is_server:
                credential = self._sender.let_in(host, reference.repository)
                return None if credential is None else Login(host.authority, credential)
        return None

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest:
        """What ``reference`` names, held to its digest and to ``size_bytes`` if that is given."""
        registry, repository = reference.registry, reference.repository
        path = f"manifests/{reference.identifier}"
        what = f"manifest {reference}"

        async def fetch(host: Host) -> FetchedManifest:
            request = _request(host, registry, repository, path, {"Accept": ACCEPT})
            response = await self._sender.send(request)
            if response.status != 200:
                raise await error_for(response, request.url)
            body = await read_body(response, DOCUMENT_LIMIT_BYTES)
            if body is None:
                raise CorruptError(f"{what}: longer than {DOCUMENT_LIMIT_BYTES} bytes")
            told = response.headers.get("Docker-Content-Digest")
            digest = _named_digest(reference, told, body, what)
            check_content(body, digest, what, size_bytes)
            content_type = response.headers.get("Content-Type", "")
            if reference.digest is None:  # no digest tells a manifest from a portal's login page
                parse_manifest(body, content_type, what)
            return FetchedManifest(body, digest, content_type)

        if reference.digest is None:
            hosts = self._book.hosts(registry, "resolve")
        else:
            hosts = self._book.for_blob(registry, repository, reference.digest)
        wanted = Wanted(registry, repository)
        return await self._soonest(hosts, wanted, reference.digest, fetch, what)

    async def document(self, blob: BlobRef) -> bytes:
        """A small blob (a config), whole, held to its digest and length."""
        registry, repository = split_name(blob.repository)
        what = name_of(blob)

        async def fetch(host: Host) -> bytes:
            request = _request(host, registry, repository, f"blobs/{blob.digest}", {})
            response = await self._sender.send(request)
            await expect_whole(response, blob.size_bytes, request.url)
            body = await read_body(response, min(blob.size_bytes, DOCUMENT_LIMIT_BYTES))
            if body is None:
                raise CorruptError(f"{what}: more bytes came than its descriptor promised")
            check_content(body, blob.digest, what, blob.size_bytes)
            return body

        hosts = self._book.for_blob(registry, repository, blob.digest)
        wanted = Wanted(registry, repository)
        return await self._soonest(hosts, wanted, blob.digest, fetch, what)

    def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        """The whole blob. A broken connection is taken up where it broke, without the caller
        noticing. Ends after exactly ``size_bytes`` or raises, as `read` does.
        """
        return BlobStream(self, blob, self._clock).run()

    async def check(self, blob: BlobRef) -> None:
        """Return if a host gives ``blob``; raises as `manifest` does, after a few tries.

        Its first byte is asked for, as a reader would: a HEAD is not what storage behind a signed
        redirect answers.
        """
        registry, repository = split_name(blob.repository)
        path, what = f"blobs/{blob.digest}", name_of(blob)
        first = {"Range": "bytes=0-0"} if blob.size_bytes else {}

        async def ask(host: Host) -> None:
            request = _request(host, registry, repository, path, first)
            response = await self._sender.send(request)
            if response.status in (400, 501):  # it has no ranges
                await response.close()
                request = _request(host, registry, repository, path, {})
                response = await self._sender.send(request)
            if response.status == 206:
                await read_body(response, 1)  # to its end, so that the connection is kept
            elif response.status == 200:
                await response.close()
            else:
                raise await error_for(response, request.url)

        async def once() -> None:
            hosts = self._book.for_blob(registry, repository, blob.digest)
            await self._soonest(hosts, Wanted(registry, repository), blob.digest, ask, what)

        await retrying(once, self._clock, self._patience)

    async def read(self, blob: BlobRef, extent: Extent) -> AsyncGenerator[bytes, None]:
        """Exactly the bytes of ``extent``, or an error, perhaps after some of them.

        Raises RangeUnsupportedError if no host serves ranges, CorruptError if one lies about the
        range, NotFoundError, UnauthorizedError, UnavailableError (BusyError, DeadlineError).
        Close the iterator (`contextlib.aclosing`) if it is not read to its end.
        """
        if extent.length <= 0:
            return
        response = await self.open_blob(blob, extent)
        try:
            async with aclosing(exactly(response, extent.length, name_of(blob))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UnavailableError:
            self.broke_off(blob)
            raise
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self._book.note_worked(host)

    def broke_off(self, blob: BlobRef) -> None:
        """A body of ``blob`` ended too early: other hosts, if there are any, come first now."""
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self._book.note_failed(host)

    def suspect(self, blob: BlobRef) -> None:
        """Tell that bytes of ``blob`` failed their digest: the host that gave them last is asked
        after the others from now on."""
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self._book.suspect(blob.repository, blob.digest, host)

    async def open_blob(self, blob: BlobRef, extent: Extent | None) -> Response:
        """The head of an answer whose body will be ``extent`` (None: all) of ``blob``."""
        registry, repository = split_name(blob.repository)
        hosts = self._book.for_blob(registry, repository, blob.digest)
        part = None if extent == Extent(0, blob.size_bytes) else extent
        headers: dict[str, str] = {}
        if part is not None:
            headers["Range"] = f"bytes={part.offset}-{part.end - 1}"
            hosts = self._ranged(hosts, repository, blob)

        async def open_at(host: Host) -> Response:
            request = _request(host, registry, repository, f"blobs/{blob.digest}", headers)
            response = await self._sender.send(request)
            if part is None:
                await expect_whole(response, blob.size_bytes, request.url)
            else:
                await expect_range(response, part, blob.size_bytes, request.url)
            self._served.put((blob.repository, blob.digest), host)
            return response

        wanted = Wanted(registry, repository)
        return await self._first(hosts, wanted, blob.digest, open_at, name_of(blob))

    def _ranged(self, hosts: list[Host], repository: str, blob: BlobRef) -> list[Host]:
        able = [host for host in hosts if not self._book.is_rangeless(host, repository)]
        if hosts and not able:
            raise RangeUnsupportedError(f"{name_of(blob)}: no host serves ranges of it")
        return able

    async def _first(
        self,
        hosts: list[Host],
        wanted: Wanted,
        digest: Digest | None,
        work: Callable[[Host], Awaitable[T]],
        what: str,
    ) -> T:
        """What the first host gives that has it; what the registry itself said if none does."""
        failures: list[tuple[Host, EmberError]] = []
        for host in hosts:
            try:
                return await work(host)
            except EmberError as error:
                self._learn(host, wanted, digest, error)
                failures.append((host, restated(error)))
        raise _summary(failures, what)

    async def _soonest(
        self,
        hosts: list[Host],
        wanted: Wanted,
        digest: Digest | None,
        fetch: Callable[[Host], Awaitable[T]],
        what: str,
    ) -> T:
        """As `_first`, of a document: a host that is slow to answer does not hold up the next one,
        since whoever decides on an image has few seconds."""
        failures: list[tuple[Host, EmberError]] = []

        def failed(number: int, error: EmberError) -> None:
            self._learn(hosts[number], wanted, digest, error)
            failures.append((hosts[number], restated(error)))

        bounded = within_deadline(fetch, what)
        ways = [functools.partial(bounded, host) for host in hosts]
        for found in await first_success(ways, failed, _HEAD_START_S):
            return found
        raise _summary(failures, what)

    def _learn(self, host: Host, wanted: Wanted, digest: Digest | None, error: EmberError) -> None:
        """What a failure says of ``host``; quiet and refusals are remembered where they arise."""
        if isinstance(error, RangeUnsupportedError):
            self._book.note_rangeless(host, wanted.repository)
        elif isinstance(error, UnavailableError) and not isinstance(error, BusyError):
            self._book.note_failed(host)
        elif digest is not None and isinstance(error, NotFoundError | CorruptError):
            self._book.suspect(wanted.image, digest, host)


def within_deadline(
    work: Callable[[Host], Awaitable[T]], what: str
) -> Callable[[Host], Awaitable[T]]:
    """``work`` with an end to it: DeadlineError when a document takes too long at one host."""

    async def bounded(host: Host) -> T:
        try:
            async with asyncio.timeout(_DOCUMENT_DEADLINE_S):
                return await work(host)
        except TimeoutError:
            raise DeadlineError(f"{what}: not here after {_DOCUMENT_DEADLINE_S:.0f} s") from None

    return bounded


def _request(
    host: Host, registry: str, repository: str, path: str, headers: dict[str, str]
) -> Request:
    query = f"?ns={host.namespace}" if host.namespace else ""
    own: dict[str, str] = {}
    for name, value in host.headers:
        own[name] = f"{own[name]}, {value}" if name in own else value
    return Request(
        url=f"{host.base}/{repository}/{path}{query}",
        host=host,
        registry=registry,
        repository=repository,
        headers=headers,
        home_headers=own,
        keep_redirect=path.startswith("blobs/"),
    )


def _named_digest(reference: Reference, told: str | None, body: bytes, what: str) -> Digest:
    """The digest to hold a manifest to: the reference's, else what the registry told with it."""
    if reference.digest is not None:
        return reference.digest
    if told is None:
        return digest_of(body)
    try:
        return Digest.parse(told.strip())
    except InvalidArgumentError:
        raise CorruptError(f"{what}: its Docker-Content-Digest is no digest") from None


def _summary(failures: list[tuple[Host, EmberError]], what: str) -> EmberError:
    """The registry's own error (the last host's, if it was not asked), with what others said."""
    if not failures:
        return NotFoundError(f"{what}: hosts.toml names no host that may be asked for it")
    failures = sorted(failures, key=lambda failure: failure[0].is_server)
    told = restated(failures[-1][1])
    if len(failures) > 1:
        others = "; ".join(str(error) for _, error in failures[:-1])
        told.args = (f"{told} (and at other hosts: {others})",)
    return told
