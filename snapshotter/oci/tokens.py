"""Tokens of the registries' token services: fetched once, shared by all, renewed when refused.

One token per (service, scope, credential). Protocol: distribution project, docs/spec/auth
(token.md: GET with basic auth; oauth.md: POST with a refresh token).
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from snapshotter.clock import Clock
from snapshotter.errors import DeadlineError, UnauthorizedError, UnavailableError
from snapshotter.oci.answers import error_for
from snapshotter.oci.challenge import Challenge
from snapshotter.oci.credentials import Credential
from snapshotter.oci.exchange import Request, Response, Sender, read_body, without_query
from snapshotter.oci.flights import Flights
from snapshotter.oci.hosts import Host, is_local
from snapshotter.oci.recollection import Recollection

_CLIENT_ID = "ember"
_BODY_LIMIT_BYTES = 1024 * 1024
_LEAST_LIFE_S = 60.0
_MOST_LIFE_S = 24 * 3600.0
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Grant:
    """For what a token is good: the key under which it is shared."""

    realm: str
    service: str
    scopes: tuple[str, ...]
    credential: Credential | None


def grant_for(
    challenge: Challenge, repository: str, credential: Credential | None, actions: str = "pull"
) -> Grant:
    """What to ask the token service for: the challenge's scope, or the right to ``actions``."""
    scopes = tuple(challenge.scope.split()) or (f"repository:{repository}:{actions}",)
    return Grant(challenge.realm, challenge.service, scopes, credential)


def basic_value(credential: Credential) -> str:
    """The Authorization of a user and password (RFC 7617; a colon in the password is fine)."""
    pair = f"{credential.username}:{credential.password}".encode(errors="replace")
    return "Basic " + base64.b64encode(pair).decode()


class TokenShop:
    """Hands out Authorization values of bearer tokens."""

    def __init__(self, sender: Sender, clock: Clock) -> None:
        self._sender = sender
        self._tokens: Recollection[Grant, str] = Recollection(clock, _LEAST_LIFE_S)
        self._flights: Flights[str] = Flights()

    async def get(self, grant: Grant, request: Request, refused: str | None) -> str:
        """A value that is not ``refused``, fetched if need be.

        ``request`` is the one that was challenged. Raises UnauthorizedError if the service
        refuses the credential, UnavailableError (BusyError, DeadlineError) if it can't be asked.
        """
        value = self._tokens.get(grant)
        if value is not None and value != refused:
            return value
        return await self._flights.join(grant, lambda: self._fetch(grant, request))

    async def _fetch(self, grant: Grant, request: Request) -> str:
        where = f"token service {without_query(grant.realm)}"
        try:
            async with asyncio.timeout(_DEADLINE_S):
                response = await self._ask(grant, request)
                if response.status in (400, 401, 403):
                    error = await error_for(response, where)
                    raise UnauthorizedError(f"{error}: the credential was refused")
                if response.status != 200:
                    error = await error_for(response, where)
                    raise UnavailableError(str(error))
                body = await read_body(response, _BODY_LIMIT_BYTES)
        except TimeoutError:
            raise DeadlineError(f"{where}: no token within {_DEADLINE_S:.0f} s") from None
        value, life_s = _parse(body, where)
        self._tokens.put(grant, value, life_s)
        return value

    async def _ask(self, grant: Grant, request: Request) -> Response:
        host = _service_host(grant.realm, request.host)
        credential = grant.credential
        if credential is not None and credential.identity_token:
            response = await self._sender.send(_refresh(grant, host, credential, request))
            if response.status not in (404, 405):
                return response
            await response.close()
        headers = {}
        if credential is not None and credential.username and credential.password:
            headers["Authorization"] = basic_value(credential)
        fields = [("service", grant.service)] if grant.service else []
        fields += [("scope", scope) for scope in grant.scopes]
        if headers:
            fields.append(("account", credential.username if credential else ""))
        return await self._sender.send(
            Request(
                url=_with_query(grant.realm, fields),
                host=host,
                registry=request.registry,
                repository=request.repository,
                home_headers=headers,
                identity=credential,
            )
        )


def _refresh(grant: Grant, host: Host, credential: Credential, request: Request) -> Request:
    form = {
        "grant_type": "refresh_token",
        "service": grant.service,
        "client_id": _CLIENT_ID,
        "scope": " ".join(grant.scopes),
        "refresh_token": credential.identity_token,
    }
    return Request(
        url=grant.realm,
        host=host,
        registry=request.registry,
        repository=request.repository,
        headers={"Content-Type": "application/x-www-form-urlencoded"},
        method="POST",
        body=urlencode(form).encode(),
        identity=credential,
    )


def _service_host(realm: str, registry: Host) -> Host:
    """The token service as a host, with the TLS of the registry that named it.

    A service without TLS is believed only on this machine, or from a registry without TLS.
    """
    try:
        parts = urlsplit(realm)
        parts.port  # noqa: B018  raises ValueError if it is not a number
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise UnauthorizedError(
            f"{registry.authority} names {without_query(realm)[:100]!r} as token service"
        )
    if parts.scheme == "http" and not registry.is_plain and not is_local(parts.netloc):
        raise UnauthorizedError(
            f"{registry.authority} names a token service without TLS ({parts.netloc[:100]!r}); "
            "no credential is sent there"
        )
    base = f"{parts.scheme}://{parts.netloc}"
    return Host(base, parts.netloc, tls=registry.tls, dial_timeout_s=registry.dial_timeout_s)


def _with_query(realm: str, fields: list[tuple[str, str]]) -> str:
    parts = urlsplit(realm)
    query = urlencode(parse_qsl(parts.query, keep_blank_values=True) + fields)
    return urlunsplit((parts.scheme, parts.netloc, parts.path or "/", query, ""))


def _parse(body: bytes | None, where: str) -> tuple[str, float]:
    """The Authorization value and for how many seconds to use it."""
    try:
        document = json.loads(body or b"")
        token = document.get("token") or document.get("access_token")
        life = document.get("expires_in", _LEAST_LIFE_S)
    except (ValueError, AttributeError, RecursionError):
        raise UnavailableError(f"{where}: the answer is no token") from None
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        raise UnavailableError(f"{where}: the answer holds no token")
    if not isinstance(life, int | float) or isinstance(life, bool) or life <= 0:
        life = _LEAST_LIFE_S
    life_s = min(max(float(life), _LEAST_LIFE_S), _MOST_LIFE_S)
    return f"Bearer {token}", life_s - min(30.0, life_s / 10)
