"""One HTTP exchange as values, and the Protocol that transport and its wrappers share.

Life of an exchange: `Sender.send` returns once the head of the answer is here, whatever its
status; the caller then either reads `chunks` to the end or calls `close`, always one of them.
A wrapper adds one rule (cool-down, redirects, authorization) and passes the rest on.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from snapshotter.errors import UnavailableError
from snapshotter.oci.hosts import Host

_OPEN_FIELDS = frozenset({"ns", "service", "scope", "account", "grant_type", "client_id"})
_URL = re.compile(r"""(https?://)(?:[^\s"'/@]*@)?([^\s"'?]*)(?:\?[^\s"']*)?""")
_KNOWN_URLS = 1024
"""Each request asks several times where it goes."""
_SHORTEST_SECRET = 4
"""Shorter words would take half of a message with them."""


class NoAnswerError(UnavailableError):
    """Nothing came back: no name, no route, no connection, or one that broke before the head."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to send. ``url`` is sent as it is, with nothing quoted again.

    ``headers`` may go anywhere; ``home_headers`` (secrets, a host's own headers) only to the
    origin of ``host``. ``repository`` and ``registry`` say for whom credentials are looked up.
    ``is_bulk``: so much will come that a connection of its own pays.
    """

    url: str
    host: Host
    registry: str
    repository: str
    headers: Mapping[str, str] = field(default_factory=dict)
    home_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    method: str = "GET"
    body: bytes | None = field(default=None, repr=False)
    keep_redirect: bool = False
    is_bulk: bool = False
    identity: object = field(default=None, repr=False)

    def to(self, url: str, *, at_home: bool) -> Request:
        """The same request for another place; secrets travel only if it is ``at_home``."""
        return replace(self, url=url, home_headers=self.home_headers if at_home else {})


class Response(Protocol):
    """The head of an answer, and its body still to come."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Case-insensitive; of a repeated header the first."""
        ...

    def header_values(self, name: str) -> list[str]:
        """Every value of a repeated header."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, not decoded. UnavailableError if it breaks, DeadlineError if it
        stalls. The connection is kept for others only if the body was read to its end."""
        ...

    def redacted(self, text: str) -> str:
        """``text``, something that came with the answer, without the secrets of its request: some
        registries repeat in an error what they were sent."""
        ...

    async def close(self) -> None:
        """Give up what is left of the body."""
        ...


class Sender(Protocol):
    """Sends a request and returns the head of the answer.

    Raises NoAnswerError, DeadlineError or BusyError if there is none.
    """

    async def send(self, request: Request) -> Response: ...


@lru_cache(_KNOWN_URLS)
def origin_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what decides whether a secret may travel."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, (parts.hostname or "").lower(), port


@lru_cache(_KNOWN_URLS)
def without_query(url: str) -> str:
    """The URL as it may stand in a message: signatures and users left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a malformed URL"
    authority = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, authority, parts.path, "", ""))


def without_queries(text: str) -> str:
    """Somebody else's words with the URLs in it as they may stand in a message."""
    return _URL.sub(r"\1\2", text)


def secrets_of(request: Request) -> tuple[str, ...]:
    """What must not come back in a message, longest first: the words of its own headers, of a body,
    and of a query, for that of a redirect is a signature."""
    form = (request.body or b"").decode(errors="replace")
    pairs = [p.partition("=") for p in f"{urlsplit(request.url).query}&{form}".split("&")]
    found = {value for name, _, value in pairs if name not in _OPEN_FIELDS}
    for value in request.home_headers.values():
        found |= {value, *value.split()}
    found |= {unquote(value) for value in found} | {_password_of(value) for value in found}
    return tuple(sorted((v for v in found if len(v) >= _SHORTEST_SECRET), key=len, reverse=True))


def redacted(request: Request, text: str) -> str:
    """``text`` without the secrets of ``request``."""
    for secret in secrets_of(request):
        text = text.replace(secret, "[hidden]")
    return text


def _password_of(text: str) -> str:
    """The password in the base64 of ``user:password``; nothing if it is no such."""
    try:
        return base64.b64decode(text, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


async def read_body(response: Response, limit_bytes: int) -> bytes | None:
    """The whole body; None (and the rest given up) if it is longer than ``limit_bytes``."""
    parts: list[bytes] = []
    total = 0
    try:
        async for chunk in response.chunks():
            total += len(chunk)
            if total > limit_bytes:
                return None
            parts.append(chunk)
    finally:
        await response.close()
    return b"".join(parts)
