"""HTTP over aiohttp: connections, deadlines, TLS, proxies. The only module that knows aiohttp.

Redirects are not followed, nothing is decoded, no cookie is kept, and the environment is not
read. Every wait has an end: connecting, waiting for the head, and a body that stops coming.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from snapshotter.errors import ConfigError, DeadlineError, UnavailableError
from snapshotter.oci.exchange import (
    NoAnswerError,
    Request,
    Response,
    secrets_of,
    without_query,
)
from snapshotter.oci.hosts import TlsFiles

_READ_BUFFER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Deadlines in seconds, and how many connections may be open.

    ``slowest_bytes_per_s`` is the least that a body must bring over ``idle_s``; without it a
    server that sends a byte now and then would hold its reader for ever.
    """

    connect_s: float = 10.0
    idle_s: float = 30.0
    queue_s: float = 60.0
    slowest_bytes_per_s: int = 512
    connections: int = 256
    connections_per_host: int = 64


class Pace:
    """Holds a body to a least speed, counting only the time spent waiting for it."""

    def __init__(self, window_s: float, bytes_per_s: int) -> None:
        self._window_s = window_s
        self._least_bytes = bytes_per_s * window_s
        self._waited_s = 0.0
        self._bytes = 0

    def too_slow(self, waited_s: float, length: int) -> bool:
        """Note ``length`` bytes that took ``waited_s``; True once a whole window was too slow."""
        self._waited_s += waited_s
        self._bytes += length
        if self._waited_s < self._window_s:
            return False
        slow = self._bytes < self._least_bytes
        self._waited_s, self._bytes = 0.0, 0
        return slow


class _AioResponse:
    """A Response over aiohttp's."""

    def __init__(self, response: aiohttp.ClientResponse, pace: Pace, request: Request) -> None:
        self._response = response
        self._pace = pace
        self._request = request
        self._where = without_query(request.url)

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    def header_values(self, name: str) -> list[str]:
        return self._response.headers.getall(name, [])

    def redacted(self, text: str) -> str:
        for secret in secrets_of(self._request):
            text = text.replace(secret, "[hidden]")
        return text

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

    async def close(self) -> None:
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


class HttpTransport:
    """A Sender that puts requests on the wire."""

    def __init__(
        self,
        limits: TransportLimits | None = None,
        *,
        proxy_of: Callable[[str], str | None] = lambda url: None,
        user_agent: str = "ember",
    ) -> None:
        self._limits = limits or TransportLimits()
        self._proxy_of = proxy_of
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._contexts: dict[TlsFiles, tuple[tuple[float, ...], ssl.SSLContext]] = {}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._limits.connections,
                limit_per_host=self._limits.connections_per_host,
                keepalive_timeout=60,
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

    async def send(self, request: Request) -> Response:
        limits = self._limits
        connect_s = request.host.dial_timeout_s or limits.connect_s
        where = without_query(request.url)
        try:
            response = await self._open().request(
                request.method,
                URL(request.url, encoded=True),
                headers={**request.headers, **request.home_headers},
                data=request.body,
                allow_redirects=False,
                proxy=self._proxy_of(request.url),
                ssl=self._context(request.host.tls) if where.startswith("https:") else True,
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    connect=limits.queue_s,
                    sock_connect=connect_s,
                    sock_read=limits.idle_s,
                ),
            )
        except TimeoutError as error:
            raise DeadlineError(f"{where}: no answer in time ({_reason(error)})") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswerError(f"{where}: {_reason(error)}") from None
        pace = Pace(limits.idle_s, limits.slowest_bytes_per_s)
        return _AioResponse(response, pace, request)

    def _context(self, tls: TlsFiles) -> ssl.SSLContext:
        """The TLS context of a host; made anew when one of its files has changed."""
        files = [*tls.ca, *(path for pair in tls.client for path in pair if path is not None)]
        try:
            stamp = tuple(path.stat().st_mtime for path in files)
            known = self._contexts.get(tls)
            if known is None or known[0] != stamp:
                known = self._contexts[tls] = (stamp, make_tls_context(tls))
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(map(str, files))
            raise ConfigError(f"TLS files {names}: {error}") from error
        return known[1]

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def make_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """A client context: the system's trust, the CAs added to it, client certificates loaded."""
    context = ssl.create_default_context()
    if tls.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    for path in tls.ca:
        context.load_verify_locations(cafile=str(path))
    for certificate, key in tls.client:
        # An encrypted key fails; without a password given here OpenSSL would ask the terminal.
        context.load_cert_chain(str(certificate), str(key) if key else None, password="")
    return context


_USER_IN_URL = re.compile(r"//[^/@\s]*@")


def _reason(error: BaseException) -> str:
    """What a library's error says, without what may be secret in a URL (user, query).

    Of a failed connection the library also prints its TLS settings, as an object with an address.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        text = f"the certificate of {error.host} is not trusted ({_cause(error.certificate_error)})"
    elif isinstance(error, aiohttp.ClientConnectorError):
        text = f"cannot connect to {error.host}:{error.port}: {_cause(error.os_error)}"
    return _USER_IN_URL.sub("//", text.partition("?")[0])[:300]


def _cause(error: Exception) -> str:
    """The operating system's or the TLS library's own words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "the handshake failed").replace("_", " ").lower()
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return f"it does not speak TLS ({reason}); registry.plain_http allows it to"
        return f"TLS: {reason}"
    if isinstance(error, OSError):
        number = error.errno or 0
        return os.strerror(number) if number > 0 else error.strerror or str(error)
    return str(error)
