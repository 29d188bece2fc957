"""Redirects to where a registry keeps its blobs, followed without letting a secret travel.

A target is remembered per blob and credential until it expires or fails, then the registry is
asked again. What the storage behind a redirect refuses says nothing about the credentials: it
never comes out of here as 401 or 403.
"""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urljoin, urlsplit

from snapshotter.clock import Clock
from snapshotter.errors import BusyError, UnavailableError
from snapshotter.oci.answers import error_for
from snapshotter.oci.exchange import (
    Request,
    Response,
    Sender,
    origin_of,
    read_body,
    without_query,
)
from snapshotter.oci.hosts import is_local
from snapshotter.oci.recollection import Recollection

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HOP_LIMIT = 5
_KEEP_S = 300.0
_MARGIN_S = 5.0
_BODY_LIMIT_BYTES = 16 * 1024
_URL_LIMIT_BYTES = 16 * 1024


class RedirectingSender:
    """A Sender that follows redirects of GET."""

    def __init__(self, inner: Sender, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._targets: Recollection[object, str] = Recollection(clock, _KEEP_S)

    async def send(self, request: Request) -> Response:
        if request.method != "GET":
            return await self._inner.send(request)
        key = (request.url, request.identity)
        target = self._targets.get(key) if request.keep_redirect else None
        if target is not None:
            response = await self._from_known(request.to(target, at_home=False))
            if response is not None:
                return response
            self._targets.drop(key)
        return await self._follow(request, key)

    async def _from_known(self, request: Request) -> Response | None:
        """The answer of a remembered target, None if it is of no use any more."""
        try:
            response = await self._inner.send(request)
        except BusyError:
            raise
        except UnavailableError:
            return None
        if response.status in (200, 206, 416):
            return response
        await _drain(response)
        return None

    async def _follow(self, request: Request, key: object) -> Response:
        start = request
        for _ in range(_HOP_LIMIT + 1):
            response = await self._inner.send(request)
            if response.status not in _REDIRECTS:
                return await self._arrived(start, request, response, key)
            location = response.headers.get("Location")
            await _drain(response)
            url = _target(request, location)
            at_home = origin_of(url) == origin_of(start.host.base)
            request = request.to(url, at_home=at_home)
        raise UnavailableError(f"{without_query(start.url)}: more than {_HOP_LIMIT} redirects")

    async def _arrived(
        self, start: Request, request: Request, response: Response, key: object
    ) -> Response:
        away = origin_of(request.url) != origin_of(start.host.base)
        if away and response.status in (401, 403):
            error = await error_for(response, without_query(request.url))
            raise UnavailableError(
                f"{error}: the storage that {start.host.authority} redirected to refused its link"
            )
        if away and start.keep_redirect and response.status in (200, 206):
            left_s = signature_left_s(request.url, self._clock.wall_ns() / 1e9)
            keep_s = _KEEP_S if left_s is None else min(_KEEP_S, left_s - _MARGIN_S)
            if keep_s > 0:
                self._targets.put(key, request.url, keep_s)
        return response


def _target(request: Request, location: str | None) -> str:
    """Where a redirect leads, checked; the query is kept as it is, for signatures cover it."""
    where = f"redirect from {without_query(request.url)}"
    if not location or len(location) > _URL_LIMIT_BYTES:
        raise UnavailableError(f"{where}: no usable Location")
    try:
        url = quote(urljoin(request.url, location.strip()), safe="%/:=&?~#+!$,;'@()*[]")
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises ValueError if it is not a number
    except ValueError:
        raise UnavailableError(f"{where}: no usable Location") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise UnavailableError(f"{where}: not to a plain http or https URL")
    leaves_tls = request.url.startswith("https:") and parts.scheme == "http"
    if leaves_tls and not is_local(parts.netloc):
        raise UnavailableError(f"{where}: it leaves TLS for {parts.hostname}")
    return url.partition("#")[0]


def signature_left_s(url: str, now_s: float) -> float | None:
    """Seconds that a signed URL is still good for, None if it does not say.

    Forms: ``X-Amz-Date`` + ``X-Amz-Expires`` and the same with ``X-Goog-`` (SigV4), ``Expires``
    (seconds since the epoch: S3 v2, GCS v2, CloudFront), ``se`` (Azure shared access signature).
    """
    query = {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}
    try:
        for prefix in ("x-amz", "x-goog"):
            if f"{prefix}-expires" in query:
                made = datetime.strptime(query[f"{prefix}-date"], "%Y%m%dT%H%M%SZ")
                made_s = made.replace(tzinfo=UTC).timestamp()
                return made_s + int(query[f"{prefix}-expires"]) - now_s
        if "expires" in query:
            return int(query["expires"]) - now_s
        if "se" in query and "sig" in query:
            end = datetime.fromisoformat(query["se"])
            return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp() - now_s
    except (ValueError, KeyError, OverflowError):
        return None
    return None


async def _drain(response: Response) -> None:
    """Read a small body to its end, so that the connection can be used again."""
    try:
        await read_body(response, _BODY_LIMIT_BYTES)
    except UnavailableError:
        return
