"""The registry client: manifests, whole blobs and exact ranges, from the first host that has them.

Documents are held to their digest here; blobs to their length here and to their digest by the
caller, who tells `suspect` when it failed. A read is one try over all hosts: how often to try,
and for how long, is the caller's affair.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import (
    CorruptError,
    InvalidArgumentError,
    RangeUnsupportedError,
    UnavailableError,
)
from snapshotter.oci.answers import error_for, expect_range, expect_whole
from snapshotter.oci.asking import Asker, request_at
from snapshotter.oci.auth import AuthorizingSender
from snapshotter.oci.credentials import Credential, Login, MemoryCredentials, Wanted
from snapshotter.oci.documents import (
    ACCEPT,
    DOCUMENT_LIMIT_BYTES,
    Descriptor,
    check_content,
    digest_of,
)
from snapshotter.oci.exchange import Response, read_body
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.hosts import Host
from snapshotter.oci.manifest import parse_manifest
from snapshotter.oci.platform import Platform
from snapshotter.oci.recollection import Recollection
from snapshotter.oci.reference import Reference, split_name
from snapshotter.oci.referrers import list_referrers
from snapshotter.oci.resolver import FetchedManifest, ResolvedImage, resolve_image
from snapshotter.oci.retry import Patience, retrying
from snapshotter.oci.streaming import BlobStream, exactly, name_of

_SMALL_BYTES = 1024 * 1024
"""What is longer gets a connection of its own."""


class RegistryClient:
    """Reads images from registries; made for many callers at once.

    ``insist`` lets each place that asked for quiet be asked once in spite of it. ``asker`` is how
    hosts are asked, for what else is done with registries (referrers, pushing).
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
        self.asker = Asker(sender, book)
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
        for host in self.asker.book.hosts(reference.registry, "resolve"):
            if host.is_server:
                credential = self.asker.sender.let_in(host, reference.repository)
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
            request = request_at(host, registry, repository, path, {"Accept": ACCEPT})
            response = await self.asker.sender.send(request)
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
            hosts = self.asker.book.hosts(registry, "resolve")
        else:
            hosts = self.asker.book.for_blob(registry, repository, reference.digest)
        wanted = Wanted(registry, repository)
        return await self.asker.soonest(hosts, wanted, reference.digest, fetch, what)

    async def document(self, blob: BlobRef) -> bytes:
        """A small blob (a config), whole, held to its digest and length."""
        registry, repository = split_name(blob.repository)
        what = name_of(blob)

        async def fetch(host: Host) -> bytes:
            request = request_at(host, registry, repository, f"blobs/{blob.digest}", {})
            response = await self.asker.sender.send(request)
            await expect_whole(response, blob.size_bytes, request.url)
            body = await read_body(response, min(blob.size_bytes, DOCUMENT_LIMIT_BYTES))
            if body is None:
                raise CorruptError(f"{what}: more bytes came than its descriptor promised")
            check_content(body, blob.digest, what, blob.size_bytes)
            return body

        hosts = self.asker.book.for_blob(registry, repository, blob.digest)
        wanted = Wanted(registry, repository)
        return await self.asker.soonest(hosts, wanted, blob.digest, fetch, what)

    async def referrers(self, image: Reference, artifact_type: str) -> list[Descriptor]:
        """What refers to ``image`` (its digest) and is of this type, or may be; see `referrers`."""
        return await list_referrers(self.asker, image, artifact_type)

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
            request = request_at(host, registry, repository, path, first)
            response = await self.asker.sender.send(request)
            if response.status in (400, 501):  # it has no ranges
                await response.close()
                request = request_at(host, registry, repository, path, {})
                response = await self.asker.sender.send(request)
            if response.status == 206:
                await read_body(response, 1)  # to its end, so that the connection is kept
            elif response.status == 200:
                await response.close()
            else:
                raise await error_for(response, request.url)

        async def once() -> None:
            hosts = self.asker.book.for_blob(registry, repository, blob.digest)
            await self.asker.soonest(hosts, Wanted(registry, repository), blob.digest, ask, what)

        await retrying(once, self._clock, self._patience)

    async def read(
        self, blob: BlobRef, extent: Extent, *, elsewhere: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Exactly the bytes of ``extent``, or an error, perhaps after some of them.

        Raises RangeUnsupportedError if no host serves ranges, CorruptError if one lies about the
        range, NotFoundError, UnauthorizedError, UnavailableError (BusyError, DeadlineError).
        Close the iterator (`contextlib.aclosing`) if it is not read to its end. ``elsewhere``: such
        a read is under way and slow, so the host that comes first comes last.
        """
        if extent.length <= 0:
            return
        response = await self.open_blob(blob, extent, elsewhere=elsewhere)
        try:
            async with aclosing(exactly(response, extent.length, name_of(blob))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UnavailableError:
            self.broke_off(blob)
            raise
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self.asker.book.note_worked(host)

    def broke_off(self, blob: BlobRef) -> None:
        """A body of ``blob`` ended too early: other hosts, if there are any, come first now."""
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self.asker.book.note_failed(host)

    def suspect(self, blob: BlobRef) -> None:
        """Tell that bytes of ``blob`` failed their digest: the host that gave them last is asked
        after the others from now on."""
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self.asker.book.suspect(blob.repository, blob.digest, host)

    def lagging(self, blob: BlobRef) -> None:
        """The host that comes first for ``blob`` is silent: others, if there are any, come first
        now."""
        registry, repository = split_name(blob.repository)
        hosts = self.asker.book.for_blob(registry, repository, blob.digest)
        able = self._ranged(hosts, repository, blob)
        if len(able) > 1:
            self.asker.book.note_failed(able[0])

    async def open_blob(
        self, blob: BlobRef, extent: Extent | None, *, elsewhere: bool = False
    ) -> Response:
        """The head of an answer whose body will be ``extent`` (None: all) of ``blob``."""
        registry, repository = split_name(blob.repository)
        hosts = self.asker.book.for_blob(registry, repository, blob.digest)
        part = None if extent == Extent(0, blob.size_bytes) else extent
        length = blob.size_bytes if extent is None else extent.length
        # One that shares a connection could share the very one that hangs.
        is_bulk = elsewhere or length > _SMALL_BYTES
        headers: dict[str, str] = {}
        if part is not None:
            headers["Range"] = f"bytes={part.offset}-{part.end - 1}"
            hosts = self._ranged(hosts, repository, blob)
        if elsewhere:
            hosts = hosts[1:] + hosts[:1]

        async def open_at(host: Host) -> Response:
            path = f"blobs/{blob.digest}"
            request = request_at(host, registry, repository, path, headers, is_bulk=is_bulk)
            response = await self.asker.sender.send(request)
            if part is None:
                await expect_whole(response, blob.size_bytes, request.url)
            else:
                await expect_range(response, part, blob.size_bytes, request.url)
            self._served.put((blob.repository, blob.digest), host)
            return response

        wanted = Wanted(registry, repository)
        return await self.asker.first(hosts, wanted, blob.digest, open_at, name_of(blob))

    def _ranged(self, hosts: list[Host], repository: str, blob: BlobRef) -> list[Host]:
        able = [host for host in hosts if not self.asker.book.is_rangeless(host, repository)]
        if hosts and not able:
            raise RangeUnsupportedError(f"{name_of(blob)}: no host serves ranges of it")
        return able


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
