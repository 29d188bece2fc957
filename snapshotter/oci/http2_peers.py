"""Which places speak HTTP/2, and one connection to each of them.

Nobody waits for a connection: it is made in the background when a place is first asked, and what is
asked meanwhile goes over HTTP/1.1. A place that does not speak it is left alone for an hour.
"""

from __future__ import annotations

import asyncio
import ssl
import weakref
from contextlib import suppress
from dataclasses import dataclass

from snapshotter.errors import ConfigError
from snapshotter.oci.exchange import Request, origin_of
from snapshotter.oci.hosts import TlsFiles
from snapshotter.oci.http2 import Http2Connection
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.trust import HTTP_1_1, HTTP_2, Trust
from snapshotter.tasks import end_all

_UNSPOKEN_S = 3600.0
_UNREACHED_S = 60.0
_AGAIN_S = 1.0
"""How soon the next connection may follow one that was made."""
_MOST_PEERS = 64

_Key = tuple[tuple[str, str, int], TlsFiles]


@dataclass
class _Peer:
    """A place; ``context`` is the trust that its connection was made with."""

    context: ssl.SSLContext
    connection: Http2Connection | None = None
    dialling: asyncio.Task[None] | None = None
    not_before_s: float = 0.0

    def close(self) -> None:
        if self.dialling is not None:
            self.dialling.cancel()
        if self.connection is not None:
            self.connection.close()


class Http2Peers:
    """Event loop only. Bounded: the place that was found first is forgotten first."""

    def __init__(self, limits: TransportLimits, user_agent: str) -> None:
        self._limits = limits
        self._user_agent = user_agent
        self._trust = Trust((HTTP_2, HTTP_1_1))
        self._peers: dict[_Key, _Peer] = {}
        self._connections: weakref.WeakSet[Http2Connection] = weakref.WeakSet()

    def connection(self, request: Request, most_streams: int) -> Http2Connection | None:
        """A connection for ``request`` on which less than so much is under way, None without."""
        key = (origin_of(request.url), request.host.tls)
        try:
            context = self._trust.context(request.host.tls)
        except ConfigError:
            return None  # HTTP/1.1 says so
        peer = self._peers.get(key)
        if peer is None or peer.context is not context:
            peer = self._new_peer(key, context)
        connection = peer.connection
        if connection is not None and connection.is_usable:
            fits = connection.has_room and connection.open_streams < most_streams
            return connection if fits else None
        self._dial(key, peer, request.host.dial_timeout_s or self._limits.connect_s)
        return None

    def _new_peer(self, key: _Key, context: ssl.SSLContext) -> _Peer:
        known = self._peers.pop(key, None)
        if known is not None and known.connection is not None:
            known.connection.retire()
        while len(self._peers) >= _MOST_PEERS:
            self._peers.pop(next(iter(self._peers))).close()
        peer = self._peers[key] = _Peer(context)
        return peer

    def _dial(self, key: _Key, peer: _Peer, connect_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if peer.connection is not None and peer.connection.faulty:
            peer.not_before_s = now_s + _UNSPOKEN_S
        peer.connection = None
        if peer.dialling is None and now_s >= peer.not_before_s:
            peer.dialling = asyncio.create_task(self._connect(key[0], peer, connect_s))

    async def _connect(self, origin: tuple[str, str, int], peer: _Peer, connect_s: float) -> None:
        loop = asyncio.get_running_loop()
        _, host, port = origin
        connection = Http2Connection(self._limits, self._user_agent)
        self._connections.add(connection)
        pause_s = _UNREACHED_S
        try:
            # What is wrong with the place is told by HTTP/1.1, which is tried as well.
            with suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout(connect_s):
                    await loop.create_connection(
                        lambda: connection, host, port, ssl=peer.context, server_hostname=host
                    )
                pause_s = _AGAIN_S if connection.speaks else _UNSPOKEN_S
        finally:
            peer.dialling = None
            peer.not_before_s = loop.time() + pause_s
        if connection.speaks:
            peer.connection = connection

    async def close(self) -> None:
        """Close every connection."""
        peers, self._peers = list(self._peers.values()), {}
        await end_all(peer.dialling for peer in peers)
        for connection in list(self._connections):
            connection.close()
