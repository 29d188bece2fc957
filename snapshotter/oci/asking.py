"""Asking the hosts of a registry, one after the other, and learning from how it went.

What all requests to registries have in common: which hosts in which order, their own headers and
``ns=``, deadlines of documents, and one error that tells what every host said.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlencode

from snapshotter.content import Digest
from snapshotter.errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    EmberError,
    NotFoundError,
    RangeUnsupportedError,
    UnavailableError,
    restated,
)
from snapshotter.oci.auth import AuthorizingSender
from snapshotter.oci.credentials import Wanted
from snapshotter.oci.exchange import Request
from snapshotter.oci.headstart import first_success
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.hosts import Host

T = TypeVar("T")

_DOCUMENT_DEADLINE_S = 60.0
_HEAD_START_S = 1.0


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks hosts, and notes in ``book`` what their failures say of them."""

    sender: AuthorizingSender
    book: HostBook

    async def first(
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

    async def soonest(
        self,
        hosts: list[Host],
        wanted: Wanted,
        digest: Digest | None,
        fetch: Callable[[Host], Awaitable[T]],
        what: str,
    ) -> T:
        """As `first`, of a document: a host that is slow to answer does not hold up the next one,
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
            self.book.note_rangeless(host, wanted.repository)
        elif isinstance(error, UnavailableError) and not isinstance(error, BusyError):
            self.book.note_failed(host)
        elif digest is not None and isinstance(error, NotFoundError | CorruptError):
            self.book.suspect(wanted.image, digest, host)


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


def request_at(
    host: Host,
    registry: str,
    repository: str,
    path: str,
    headers: dict[str, str],
    query: dict[str, str] | None = None,
    *,
    is_bulk: bool = False,
) -> Request:
    """A GET of ``path`` in a repository, as ``host`` wants it."""
    fields = {**(query or {}), **({"ns": host.namespace} if host.namespace else {})}
    own: dict[str, str] = {}
    for name, value in host.headers:
        own[name] = f"{own[name]}, {value}" if name in own else value
    return Request(
        url=f"{host.base}/{repository}/{path}{'?' if fields else ''}{urlencode(fields, safe='/:')}",
        host=host,
        registry=registry,
        repository=repository,
        headers=headers,
        home_headers=own,
        keep_redirect=path.startswith("blobs/"),
        is_bulk=is_bulk,
    )


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
