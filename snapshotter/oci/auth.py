"""Authorization: meets a host's challenge with each credential there is until one is let in.

401 and 403 are both taken as "perhaps expired": the token is renewed once, then the source is
asked for the credential anew, then the next credential is tried. What was refused is not tried
again for a few seconds, so that a thousand readers of a lost image don't storm the registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from snapshotter.clock import Clock
from snapshotter.errors import UnauthorizedError
from snapshotter.oci.answers import error_for
from snapshotter.oci.challenge import Challenge, choose, parse_challenges
from snapshotter.oci.credentials import Candidate, Credential, CredentialSource, Search, Wanted
from snapshotter.oci.exchange import Request, Response, Sender, origin_of, without_query
from snapshotter.oci.hosts import Host
from snapshotter.oci.recollection import Recollection
from snapshotter.oci.tokens import TokenShop, basic_value, grant_for

_REFUSED_S = 5.0
_LEARNT_S = 3600.0
PULL, PUSH = "pull", "pull,push"

_Place = tuple[str, str, str]
"""Host, repository and what is done there: who may not push may pull all the same."""


def place_of(request: Request) -> _Place:
    """What a request's credentials are learnt for."""
    action = PULL if request.method in ("GET", "HEAD") else PUSH
    return (request.host.base, request.repository, action)


class AuthorizingSender:
    """A Sender that adds Authorization; raises UnauthorizedError when nothing is let in."""

    def __init__(self, inner: Sender, sources: Sequence[CredentialSource], clock: Clock) -> None:
        self._inner = inner
        self._sources = tuple(sources)
        self._shop = TokenShop(inner, clock)
        self._challenges: Recollection[_Place, Challenge] = Recollection(clock, _LEARNT_S)
        self._liked: Recollection[_Place, Candidate] = Recollection(clock, _LEARNT_S)
        self._refused: Recollection[tuple[_Place, Credential | None], str]
        self._refused = Recollection(clock, _REFUSED_S)

    async def send(self, request: Request) -> Response:
        host = request.host
        away = origin_of(request.url) != origin_of(host.base)  # an upload's Location, say
        if away or any(name.lower() == "authorization" for name in request.home_headers):
            return await self._inner.send(request)
        place = place_of(request)
        registry = request.registry if host.is_server else host.authority
        search = Search(self._sources, Wanted(registry, request.repository))
        refusals: list[str] = []
        async for candidate in self._in_order(place, search):
            refusal = self._refused.get((place, candidate.credential))
            if refusal is None:
                answer = await _Attempt(self, request, place, search, candidate).run()
                if not isinstance(answer, str):
                    return answer
                refusal = answer
                self._refused.put((place, candidate.credential), refusal)
            owner = candidate.source.name if candidate.source else "no credentials"
            refusals.append(f"{owner}: {refusal}")
        told = "; ".join([*refusals, *search.problems])
        raise UnauthorizedError(
            f"{without_query(request.url)}: the registry lets in none of the credentials that Ember"
            f" has ({told}); docs/private-registries.md says where they come from"
        )

    def let_in(self, host: Host, repository: str) -> Credential | None:
        """The credential that ``host`` let in last; None if it asked for none, or never was."""
        liked = self._liked.get((host.base, repository, PULL))
        return None if liked is None else liked.credential

    async def _in_order(self, place: _Place, search: Search) -> AsyncIterator[Candidate]:
        """The candidate that worked last, if its source still has it, then all the others."""
        liked = self._liked.get(place)
        if liked is not None and liked.source is not None:
            found = await search.find(liked.source, fresh=False)
            if liked.credential not in found:
                liked = None
        if liked is not None:
            yield liked
        async for candidate in search.candidates():
            if liked is None or candidate.credential != liked.credential:
                yield candidate

    async def value_at_first(self, request: Request, credential: Credential | None) -> str | None:
        """The Authorization to send before being challenged, None for none.

        Where the place has challenged before, its token is fetched ahead: readers of an expired
        token don't all run into a refusal.
        """
        challenge = self._challenges.get(place_of(request))
        if challenge is None:
            if credential is not None and credential.registry_token:
                return f"Bearer {credential.registry_token}"
            return None
        return await self.value_for(challenge, request, credential, None)

    async def value_for(
        self,
        challenge: Challenge,
        request: Request,
        credential: Credential | None,
        refused: str | None,
    ) -> str | None:
        """The Authorization that meets ``challenge``; None if this credential can't."""
        if credential is not None and credential.registry_token:
            return f"Bearer {credential.registry_token}"
        if challenge.scheme == "basic":
            return basic_value(credential) if credential and credential.password else None
        actions = place_of(request)[-1]
        grant = grant_for(challenge, request.repository, credential, actions)
        return await self._shop.get(grant, request, refused)

    def challenge_in(self, place: _Place, response: Response) -> Challenge | None:
        """What the refusal asks for, or (a bare 403) what the place asked for before."""
        told = choose(parse_challenges(response.header_values("WWW-Authenticate")))
        if told is not None:
            self._challenges.put(place, told)
        return told or self._challenges.get(place)

    def known_challenge(self, place: _Place) -> Challenge | None:
        """What the place asked for before."""
        return self._challenges.get(place)

    def like(self, place: _Place, candidate: Candidate) -> None:
        """It worked; try it first from now on."""
        self._liked.put(place, candidate)

    async def transmit(
        self, request: Request, value: str | None, credential: Credential | None
    ) -> Response:
        headers = dict(request.home_headers)
        if value is not None:
            headers["Authorization"] = value
        return await self._inner.send(replace(request, home_headers=headers, identity=credential))


class _Attempt:
    """One request with one candidate: as things stand, challenged, and with it renewed."""

    def __init__(
        self,
        sender: AuthorizingSender,
        request: Request,
        place: _Place,
        search: Search,
        candidate: Candidate,
    ) -> None:
        self._sender = sender
        self._request = request
        self._place = place
        self._search = search
        self._candidate = candidate
        self._refusal = "refused"
        self._challenge: Challenge | None = None

    async def run(self) -> Response | str:
        """The answer, or why the candidate is refused."""
        response = await self._as_things_stand()
        if response is None:
            anew = await self._anew()
            if anew is not None:
                response = await self._renewed(anew, None)
        return self._refusal if response is None else response

    async def _as_things_stand(self) -> Response | None:
        credential = self._candidate.credential
        try:
            value = await self._sender.value_at_first(self._request, credential)
        except UnauthorizedError as error:
            self._refusal = str(error)
            return None
        response = await self._send(value, credential)
        return await self._renewed(credential, value) if response is None else response

    async def _send(self, value: str | None, credential: Credential | None) -> Response | None:
        response = await self._sender.transmit(self._request, value, credential)
        if response.status not in (401, 403):
            if response.status < 400:
                self._sender.like(self._place, Candidate(credential, self._candidate.source))
            return response
        self._challenge = self._sender.challenge_in(self._place, response)
        self._refusal = str(await error_for(response, "")).removeprefix(": ")
        return None

    async def _renewed(self, credential: Credential | None, refused: str | None) -> Response | None:
        """Once more with what the challenge asks for, if that is something new."""
        challenge = self._challenge or self._sender.known_challenge(self._place)
        if challenge is None:
            return None
        try:
            value = await self._sender.value_for(challenge, self._request, credential, refused)
        except UnauthorizedError as error:
            self._refusal = str(error)
            return None
        if value is None or value == refused:
            return None
        return await self._send(value, credential)

    async def _anew(self) -> Credential | None:
        """The credential as its source has it now, None if it is still the same."""
        source, old = self._candidate.source, self._candidate.credential
        if source is None:
            return None
        for credential in await self._search.find(source, fresh=True):
            if credential != old and not credential.is_empty:
                return credential
        return None
