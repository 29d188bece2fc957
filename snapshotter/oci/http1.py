"""HTTP/1.1 over aiohttp, the only module that knows it: a connection for each request under way.

Redirects are not followed, nothing is decoded, no cookie is kept, and the environment is not
read. Every wait has an end: connecting, waiting for the head, and a body that stops coming.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from yarl import URL

from snapshotter.errors import DeadlineError, UnavailableError
from snapshotter.oci.exchange import (
    NoAnswerError,
    Request,
    Response,
    origin_of,
    redacted,
    without_query,
)
from snapshotter.oci.limits import Pace, TransportLimits
from snapshotter.oci.trust import Trust, way_to_trust, words_of_tls

_READ_BUFFER_BYTES = 256 * 1024
_KNOWN_ORIGINS = 256
_Origin = tuple[str, str, int]


class _Idle:
    """About how many connections to each origin lie idle: those given back and not taken since."""

    def __init__(self, keep_s: float, most: int) -> None:
        self._keep_s = keep_s
        self._most = most
        self._since: dict[_Origin, deque[float]] = {}

    def put(self, origin: _Origin) -> None:
        while len(self._since) >= _KNOWN_ORIGINS:  # redirects may lead to ever new ones
            del self._since[next(iter(self._since))]
        since = self._since.setdefault(origin, deque(maxlen=self._most))
        since.append(asyncio.get_running_loop().time())

    def take(self, origin: _Origin) -> None:
        since = self._since.get(origin)
        if since:
            since.pop()

    def any(self, origin: _Origin) -> bool:
        since = self._since.get(origin)
        if since is None:
            return False
        oldest_s = asyncio.get_running_loop().time() - self._keep_s
        while since and since[0] < oldest_s:
            since.popleft()
        if not since:
            del self._since[origin]
            return False
        return True


class _AioResponse:
    """A Response over aiohttp's."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        pace: Pace,
        request: Request,
        ended: Callable[[bool], None],
    ) -> None:
        self._response = response
        self._pace = pace
        self._request = request
        self._ended = ended
        self._is_open = True

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    def header_values(self, name: str) -> list[str]:
        return self._response.headers.getall(name, [])

    def redacted(self, text: str) -> str:
        return redacted(self._request, text)

    async def chunks(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        content = self._response.content
        try:
            while True:
                began = clock()
                try:
                    chunk = await content.readany()
                except TimeoutError:
                    raise DeadlineError(f"{self._where}: the body stopped coming") from None
                except (aiohttp.ClientError, OSError) as error:
                    raise UnavailableError(
                        f"{self._where}: the connection broke in mid-body ({_reason(error)})"
                    ) from None
                if not chunk:
                    return
                if self._pace.too_slow(clock() - began, len(chunk)):
                    raise DeadlineError(f"{self._where}: the body comes too slowly")
                yield chunk
        finally:
            await self.close()

    @property
    def _where(self) -> str:
        return without_query(self._request.url)

    async def close(self) -> None:
        at_end = self._response.content.is_eof()
        if at_end:
            self._response.release()
        else:
            self._response.close()
        if self._is_open:
            self._is_open = False
            self._ended(at_end)


class Http1Sender:
    """A Sender that takes a connection for each request; it queues when there are too many."""

    def __init__(
        self,
        limits: TransportLimits,
        *,
        proxy_of: Callable[[str], str | None] = lambda url: None,
        user_agent: str = "ember",
    ) -> None:
        self._limits = limits
        self._proxy_of = proxy_of
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._trust = Trust()
        self._idle = _Idle(limits.keep_s, limits.connections_per_host)
        self._under_way: dict[_Origin, int] = {}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._limits.connections,
                limit_per_host=self._limits.connections_per_host,
                keepalive_timeout=self._limits.keep_s,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BUFFER_BYTES,
                headers={"User-Agent": self._user_agent, "Accept-Encoding": "identity"},
                trust_env=False,
            )
        return self._session

    def has_idle(self, origin: _Origin) -> bool:
        """Whether a connection seems to be there that nobody uses: no handshake is needed."""
        return self._idle.any(origin)

    def is_full(self, origin: _Origin) -> bool:
        """Whether the next request to ``origin`` has to queue for a connection."""
        return self._under_way.get(origin, 0) >= self._limits.connections_per_host

    async def send(self, request: Request) -> Response:
        origin = origin_of(request.url)
        self._idle.take(origin)
        self._under_way[origin] = self._under_way.get(origin, 0) + 1
        try:
            response = await self._exchange(request)
        except BaseException:
            self._ended(origin)
            raise
        keeps = response.headers.get("Connection", "").lower() != "close"

        def ended(at_end: bool) -> None:
            self._ended(origin)
            if at_end and keeps:
                self._idle.put(origin)

        limits = self._limits
        pace = Pace(limits.idle_s, limits.slowest_bytes_per_s)
        return _AioResponse(response, pace, request, ended)

    def _ended(self, origin: _Origin) -> None:
        left = self._under_way.pop(origin, 1) - 1
        if left > 0:
            self._under_way[origin] = left

    async def _exchange(self, request: Request) -> aiohttp.ClientResponse:
        limits = self._limits
        is_tls = request.url.startswith("https:")
        try:
            return await self._open().request(
                request.method,
                URL(request.url, encoded=True),
                headers={**request.headers, **request.home_headers},
                data=request.body,
                allow_redirects=False,
                proxy=self._proxy_of(request.url),
                ssl=self._trust.context(request.host.tls) if is_tls else True,
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    connect=limits.queue_s,
                    sock_connect=request.host.dial_timeout_s or limits.connect_s,
                    sock_read=limits.idle_s,
                ),
            )
        except TimeoutError as error:
            where = without_query(request.url)
            raise DeadlineError(f"{where}: no answer in time ({_reason(error)})") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswerError(f"{without_query(request.url)}: {_reason(error)}") from None

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


_USER_IN_URL = re.compile(r"//[^/@\s]*@")


def _reason(error: BaseException) -> str:
    """What a library's error says, without what may be secret in a URL (user, query).

    Of a failed connection the library also prints its TLS settings, as an object with an address.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        text = f"the certificate of {error.host} is not trusted ({_cause(cause)})"
        if isinstance(cause, ssl.SSLCertVerificationError):
            text += way_to_trust(cause)
    elif isinstance(error, aiohttp.ClientConnectorError):
        text = f"cannot connect to {error.host}:{error.port}: {_cause(error.os_error)}"
    elif isinstance(error.__cause__, ssl.SSLError):
        text = words_of_tls(error.__cause__)
    return _USER_IN_URL.sub("//", text.partition("?")[0])[:300]


def _cause(error: Exception) -> str:
    """The operating system's or the TLS library's own words."""
    if isinstance(error, ssl.SSLError):
        return words_of_tls(error)
    if isinstance(error, OSError):
        number = error.errno or 0
        return os.strerror(number) if number > 0 else error.strerror or str(error)
    return str(error)
