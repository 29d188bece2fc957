"""The registry client: manifests, whole blobs and exact ranges, from the first host that has them.

Bytes are held to their length here and to their digest by the caller, who tells `suspect` when it
failed. One call is one try over all hosts (but a broken stream is taken up again); how often to
try and how long is the caller's affair.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import (
    CorruptError,
    EmberError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
)
from snapshotter.oci.answers import error_for, expect_range, expect_whole
from snapshotter.oci.documents import ACCEPT, DOCUMENT_LIMIT_BYTES
from snapshotter.oci.exchange import Request, Response, Sender, read_body
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.hosts import Host
from snapshotter.oci.platform import Platform
from snapshotter.oci.recollection import Recollection
from snapshotter.oci.reference import Reference, split_name
from snapshotter.oci.resolver import ResolvedImage, resolve_image

Check = Callable[[Response, str], Awaitable[None]]

_RESUMES = 5
_RESUME_PROGRESS_BYTES = 1024 * 1024
_RESUME_DELAY_S = 0.25


class RegistryClient:
    """Reads images from registries; made for many callers at once."""

    def __init__(
        self,
        sender: Sender,
        book: HostBook,
        clock: Clock,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._sender = sender
        self._on_close = on_close
        self._book = book
        self._clock = clock
        self._served: Recollection[tuple[str, object], Host] = Recollection(clock, 3600)

    async def close(self) -> None:
        """Close the connections beneath; reads under way fail."""
        if self._on_close is not None:
            await self._on_close()

    async def resolve(self, reference: Reference, platform: Platform) -> ResolvedImage:
        """The manifest, config and layers of ``reference`` for ``platform``, all verified.

        Raises NotFoundError (no such image, or none for this platform), UnauthorizedError,
        RefusedError (not an image that can be used), CorruptError and UnavailableError.
        """
        return await resolve_image(self, reference, platform)

    async def manifest(self, reference: Reference) -> tuple[bytes, str, str | None]:
        """Body, Content-Type and Docker-Content-Digest of what ``reference`` names. Unverified."""
        capability = "pull" if reference.digest else "resolve"
        hosts = self._book.hosts(reference.registry, capability)
        response, _ = await self._open(
            hosts,
            reference.registry,
            reference.repository,
            f"manifests/{reference.identifier}",
            {"Accept": ACCEPT},
            _expect_ok,
        )
        content_type = response.headers.get("Content-Type", "")
        told_digest = response.headers.get("Docker-Content-Digest")
        body = await read_body(response, DOCUMENT_LIMIT_BYTES)
        if body is None:
            raise CorruptError(f"manifest {reference}: longer than {DOCUMENT_LIMIT_BYTES} bytes")
        return body, content_type, told_digest

    def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        """The whole blob. A broken connection is taken up where it broke, without the caller
        noticing. Ends after exactly ``size_bytes`` or raises."""
        return _Stream(self, blob, self._clock).run()

    def read(self, blob: BlobRef, extent: Extent) -> AsyncGenerator[bytes, None]:
        """Exactly the bytes of ``extent``, or an error, perhaps after some of them.

        Raises RangeUnsupportedError if no host serves ranges, CorruptError if one lies about the
        range, NotFoundError, UnauthorizedError, UnavailableError (BusyError, DeadlineError).
        Close the iterator (`contextlib.aclosing`) if it is not read to its end.
        """
        return self._read(blob, extent)

    async def _read(self, blob: BlobRef, extent: Extent) -> AsyncGenerator[bytes, None]:
        if extent.length <= 0:
            return
        response = await self.open_blob(blob, extent)
        async with aclosing(exactly(response, extent.length, _name(blob))) as chunks:
            async for chunk in chunks:
                yield chunk

    def suspect(self, blob: BlobRef) -> None:
        """Tell that bytes of ``blob`` failed their digest: the host that gave them is asked last
        from now on."""
        host = self._served.get((blob.repository, blob.digest))
        if host is not None:
            self._book.suspect(split_name(blob.repository)[1], blob.digest, host)

    async def open_blob(self, blob: BlobRef, extent: Extent | None) -> Response:
        """The head of an answer whose body will be ``extent`` (None: all) of ``blob``."""
        registry, repository = split_name(blob.repository)
        hosts = self._book.for_blob(registry, repository, blob.digest)
        headers = {}
        whole = Extent(0, blob.size_bytes)
        if extent is not None and extent != whole:
            headers["Range"] = f"bytes={extent.offset}-{extent.end - 1}"
            hosts = self._ranged(hosts, repository, blob)

        async def check(response: Response, what: str) -> None:
            if "Range" in headers and extent is not None:
                await expect_range(response, extent, blob.size_bytes, what)
            else:
                await expect_whole(response, blob.size_bytes, what)

        path = f"blobs/{blob.digest}"
        response, host = await self._open(hosts, registry, repository, path, headers, check)
        self._served.put((blob.repository, blob.digest), host)
        return response

    def _ranged(self, hosts: list[Host], repository: str, blob: BlobRef) -> list[Host]:
        able = [host for host in hosts if not self._book.is_rangeless(host, repository)]
        if hosts and not able:
            raise RangeUnsupportedError(f"{_name(blob)}: no host serves ranges of it")
        return able

    async def _open(
        self,
        hosts: list[Host],
        registry: str,
        repository: str,
        path: str,
        headers: dict[str, str],
        check: Check,
    ) -> tuple[Response, Host]:
        """The first host's answer that passes ``check``; what the last host said if none does."""
        failures: list[EmberError] = []
        for host in hosts:
            query = f"?ns={host.namespace}" if host.namespace else ""
            url = f"{host.base}/{repository}/{path}{query}"
            request = Request(
                url=url,
                host=host,
                registry=registry,
                repository=repository,
                headers=headers,
                home_headers=dict(host.headers),
                keep_redirect=path.startswith("blobs/"),
            )
            try:
                response = await self._sender.send(request)
                await check(response, url)
            except RangeUnsupportedError as error:
                self._book.note_rangeless(host, repository)
                failures.append(error)
            except EmberError as error:
                failures.append(error)
            else:
                return response, host
        raise _summary(failures, f"{registry}/{repository}/{path}")


class _Stream:
    """A whole blob read over as many connections as it takes."""

    def __init__(self, client: RegistryClient, blob: BlobRef, clock: Clock) -> None:
        self._client = client
        self._blob = blob
        self._clock = clock
        self._offset = 0
        self._failures = 0
        self._progress_mark = 0

    async def run(self) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                response, skip = await self._continue()
                length = self._blob.size_bytes - self._offset + skip
                async with aclosing(exactly(response, length, _name(self._blob))) as chunks:
                    async for chunk in chunks:
                        fresh = chunk[skip:]
                        skip -= len(chunk) - len(fresh)
                        self._offset += len(fresh)
                        if fresh:
                            yield fresh
                return
            except UnavailableError as error:
                if 0 < self._offset == self._blob.size_bytes:
                    return
                await self._pause(error)

    async def _continue(self) -> tuple[Response, int]:
        """The next answer, and how many of its first bytes are known already."""
        if self._offset == 0:
            return await self._client.open_blob(self._blob, None), 0
        rest = Extent(self._offset, self._blob.size_bytes - self._offset)
        try:
            return await self._client.open_blob(self._blob, rest), 0
        except RangeUnsupportedError:
            return await self._client.open_blob(self._blob, None), self._offset

    async def _pause(self, error: UnavailableError) -> None:
        """Wait before the next try, or raise ``error`` if too many brought too little.

        Only a body that broke is taken up again; the first answer's refusal is the caller's.
        """
        if self._offset - self._progress_mark >= _RESUME_PROGRESS_BYTES:
            self._failures = 0
        self._progress_mark = self._offset
        self._failures += 1
        retry_after_s = getattr(error, "retry_after_s", None)
        if self._offset == 0 or self._failures > _RESUMES or (retry_after_s or 0) > 60:
            raise error
        delay_s = _RESUME_DELAY_S * 2 ** (self._failures - 1) * random.uniform(0.5, 1.5)
        await self._clock.sleep(max(delay_s, retry_after_s or 0))


async def exactly(response: Response, length_bytes: int, what: str) -> AsyncGenerator[bytes, None]:
    """The body, held to ``length_bytes``. CorruptError if more comes, UnavailableError if less."""
    left = length_bytes
    try:
        async for chunk in response.chunks():
            left -= len(chunk)
            if left < 0:
                raise CorruptError(f"{what}: more bytes came than were asked for")
            yield chunk
        if left > 0:
            raise UnavailableError(f"{what}: the body ended {left} bytes too early")
    finally:
        await response.close()


async def _expect_ok(response: Response, what: str) -> None:
    if response.status != 200:
        raise await error_for(response, what)


def _name(blob: BlobRef) -> str:
    return f"blob {blob.repository}@{blob.digest}"


def _summary(failures: list[EmberError], what: str) -> EmberError:
    """The last host's error, which is the registry's own, with what the mirrors said before."""
    if not failures:
        return NotFoundError(f"{what}: hosts.toml names no host that may be asked for it")
    last = failures[-1]
    if len(failures) > 1:
        others = "; ".join(str(error) for error in failures[:-1])
        last.args = (f"{last} (before that: {others})",)
    return last
