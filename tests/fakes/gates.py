"""What guards a fake registry: basic auth, or tokens from a token service with its own page."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, error


def basic(username: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()


@dataclass
class BasicGate:
    """Lets in who knows one of the pairs; refuses with ``status``."""

    users: dict[str, str]
    status: int = 401

    def check(self, seen: Seen) -> Answer | None:
        given = seen.headers.get("authorization")
        if any(given == basic(name, word) for name, word in self.users.items()):
            return None
        status = 401 if given is None else self.status
        return error(status, "UNAUTHORIZED", [("WWW-Authenticate", 'Basic realm="fake"')])


@dataclass
class TokenGate:
    """Wants a token; `tokens` counts them. ``users`` None lets anybody have one."""

    registry: FakeRegistry
    users: dict[str, str] | None = None
    refresh_tokens: tuple[str, ...] = ()
    expires_in: object = 300
    status: int = 401
    realm: str | None = None
    field_name: str = "token"
    tokens: int = 0
    good: set[str] = field(default_factory=set)
    asked: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry.gate = self
        self.registry.page("/token", self._token)

    def revoke(self) -> None:
        """No token that was given out is good any more."""
        self.good.clear()

    def check(self, seen: Seen) -> Answer | None:
        given = seen.headers.get("authorization", "")
        if given.removeprefix("Bearer ") in self.good:
            return None
        realm = self.realm or f"{self.registry.url}/token"
        repository = seen.path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]
        wanted = f'Bearer realm="{realm}",service="fake",scope="repository:{repository}:pull"'
        headers = [] if self.status == 403 and given else [("WWW-Authenticate", wanted)]
        return error(self.status if given else 401, "UNAUTHORIZED", headers)

    def _token(self, seen: Seen) -> Answer:
        self.asked.append(seen)
        if not self._may(seen):
            return error(401, "UNAUTHORIZED")
        self.tokens += 1
        token = f"token-{self.tokens}"
        self.good.add(token)
        document = {self.field_name: token, "expires_in": self.expires_in}
        return Answer(200, [("Content-Type", "application/json")], json.dumps(document).encode())

    def _may(self, seen: Seen) -> bool:
        if seen.method == "POST":
            form = parse_qs(seen.body.decode())
            return form.get("refresh_token", [""])[0] in self.refresh_tokens
        if self.users is None:
            return True
        given = seen.headers.get("authorization")
        return any(given == basic(name, word) for name, word in self.users.items())


@dataclass
class Storage:
    """Where a registry redirects to: another server, links that are signed and expire.

    Like a real one it refuses a request that brings an Authorization beside the signature.
    """

    server: FakeRegistry
    good: set[str] = field(default_factory=set)
    signed: int = 0
    status: int = 403
    extra: str = ""

    def serve_for(self, registry: FakeRegistry) -> None:
        """Redirect the blobs of ``registry`` here."""

        def redirect(seen: Seen, answer: Answer) -> Answer:
            if answer.status not in (200, 206):
                return answer
            self.signed += 1
            signature = f"s/{self.signed}%2B=="
            self.good.add(f"sig={signature}{self.extra}")
            location = f"{self.server.url}{seen.path}?sig={signature}{self.extra}"
            return Answer(307, [("Location", location)], b"go there")

        registry.inject(redirect, lambda seen: "/blobs/" in seen.path)
        self.server.gate = self

    def expire(self) -> None:
        """No link that was given out is good any more."""
        self.good.clear()

    def check(self, seen: Seen) -> Answer | None:
        if "authorization" in seen.headers:
            return error(400, "ONE_AUTH_ONLY")
        if urlsplit(seen.target).query in self.good:
            return None
        return error(self.status, "EXPIRED")
