"""Puts requests on the wire; every exchange of Ember's goes through here.

HTTP/1.1 carries what is large, and what an idle connection is there for. Small GETs that would have
to make a connection, or to wait for one, share one HTTP/2 connection where the place speaks it:
docs/adr/http-2-where-it-helps.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable

from snapshotter.oci.exchange import Request, Response, origin_of
from snapshotter.oci.http1 import Http1Sender
from snapshotter.oci.http2 import Http2Connection, NotTakenError
from snapshotter.oci.http2_peers import Http2Peers
from snapshotter.oci.limits import TransportLimits

_FEW_STREAMS = 4
"""So many may share a connection before others are made: one connection has one congestion window,
and more of them are sooner at the speed of the link."""
_MANY_STREAMS = 64


class HttpTransport:
    """A Sender that puts requests on the wire."""

    def __init__(
        self,
        limits: TransportLimits | None = None,
        *,
        proxy_of: Callable[[str], str | None] = lambda url: None,
        user_agent: str = "ember",
    ) -> None:
        limits = limits or TransportLimits()
        self._proxy_of = proxy_of
        self._http1 = Http1Sender(limits, proxy_of=proxy_of, user_agent=user_agent)
        self._http2 = Http2Peers(limits, user_agent)

    async def send(self, request: Request) -> Response:
        shared = self._shared(request)
        if shared is not None:
            try:
                return await shared.send(request)
            except NotTakenError:  # it went away just now
                pass
        return await self._http1.send(request)

    def _shared(self, request: Request) -> Http2Connection | None:
        """The HTTP/2 connection that is of use for ``request``, if there is one."""
        if request.is_bulk or request.method != "GET" or request.body is not None:
            return None
        if not request.url.startswith("https:") or self._proxy_of(request.url) is not None:
            return None
        origin = origin_of(request.url)
        if self._http1.has_idle(origin):
            return None
        most = _MANY_STREAMS if self._http1.is_full(origin) else _FEW_STREAMS
        return self._http2.connection(request, most)

    async def close(self) -> None:
        """Close every connection."""
        await self._http2.close()
        await self._http1.close()
