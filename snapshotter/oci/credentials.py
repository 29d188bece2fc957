"""Credentials, and where they come from: several sources asked in order.

A secret never shows: not in a repr, not in a message, not in a log. A source is asked only when
the ones before it had nothing that works; one that fails is noted and passed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from snapshotter.errors import EmberError, InvalidArgumentError
from snapshotter.oci.hosts import DOCKER_HUB_HOST
from snapshotter.oci.reference import DOCKER_HUB, parse_reference

_LONGEST = 64 * 1024
_MEMORY_LIMIT = 4096
_PER_IMAGE_LIMIT = 4


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """One way to log in: user and password, an identity token (an OAuth refresh token), or a
    registry token (sent as it is). Usable as a key in memory; shows nothing of itself."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.registry_token or self.identity_token or (self.username and self.password))

    @property
    def length(self) -> int:
        """Characters of all of it."""
        words = (self.username, self.password, self.identity_token, self.registry_token)
        return sum(map(len, words))

    def __repr__(self) -> str:
        return "Credential(hidden)"


@dataclass(frozen=True, slots=True)
class Wanted:
    """For what a credential is wanted: ``registry`` as image names write it, and a repository."""

    registry: str
    repository: str

    @property
    def image(self) -> str:
        return f"{self.registry}/{self.repository}"


@dataclass(frozen=True, slots=True)
class Login:
    """A credential that a registry let in, and the authority (``host[:port]``) that did."""

    authority: str
    credential: Credential


class CredentialSource(Protocol):
    """Knows credentials. ``name`` is for messages.

    `find` returns what fits, best first, and raises EmberError if the source itself fails;
    ``fresh`` means that what it gave before was refused, so it must not answer from a cache.
    """

    @property
    def name(self) -> str: ...

    async def find(self, wanted: Wanted, *, fresh: bool) -> Sequence[Credential]: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A credential, and the source that has it (None: nobody's, the anonymous one)."""

    credential: Credential | None
    source: CredentialSource | None = None


@dataclass
class Search:
    """One walk over the sources. ``problems`` fills with what the failing ones said."""

    sources: Sequence[CredentialSource]
    wanted: Wanted
    problems: list[str] = field(default_factory=list)

    async def candidates(self) -> AsyncIterator[Candidate]:
        """Every credential in order, each once, the anonymous one last."""
        given: set[Credential] = set()
        for source in self.sources:
            for credential in await self.find(source, fresh=False):
                if credential not in given and not credential.is_empty:
                    given.add(credential)
                    yield Candidate(credential, source)
        yield Candidate(None)

    async def find(self, source: CredentialSource, *, fresh: bool) -> Sequence[Credential]:
        """What one source has; nothing, and a problem noted, if it fails."""
        try:
            return await source.find(self.wanted, fresh=fresh)
        except EmberError as error:
            self.problems.append(f"{source.name}: {error}")
            return []


def server_matches(server: str, registry: str) -> bool:
    """Whether a server address, as configs and the CRI write them, means ``registry``.

    ``https://index.docker.io/v1/``, ``index.docker.io`` and ``registry-1.docker.io`` are the Hub.
    """
    try:
        authority = urlsplit(server if "//" in server else f"//{server}").netloc.lower()
    except ValueError:  # not an address at all
        return False
    hub = (DOCKER_HUB, f"index.{DOCKER_HUB}", DOCKER_HUB_HOST)
    return authority == registry.lower() or (authority in hub and registry in hub)


class MemoryCredentials:
    """Credentials that someone handed over, by image reference; gone when the process ends.

    One is good for the repository it was given for, and for those below it. Of several the one
    for the longest name comes first, of the same name the latest. Two pods may hold different
    credentials for one image, so a few are kept for each.
    """

    def __init__(self, name: str = "credentials of pulls") -> None:
        self._name = name
        self._names: OrderedDict[str, str] = OrderedDict()
        self._by_name: dict[str, dict[str, list[Credential]]] = {}

    @property
    def name(self) -> str:
        return self._name

    def put(self, image_ref: str, credential: Credential, server_address: str = "") -> bool:
        """Remember ``credential`` for an image; False if it is empty, for another server, or longer
        than any registry would take in a header.

        Raises InvalidArgumentError if ``image_ref`` is no reference.
        """
        reference = parse_reference(image_ref)
        if server_address and not server_matches(server_address, reference.registry):
            return False
        if credential.is_empty or credential.length > _LONGEST:
            return False
        key = str(reference)
        kept = [known for known in self._of(key) if known != credential]
        self._drop(key)
        self._names[key] = reference.name
        latest = [*kept, credential][-_PER_IMAGE_LIMIT:]
        self._by_name.setdefault(reference.name, {})[key] = latest
        if len(self._names) > _MEMORY_LIMIT:
            self._drop(next(iter(self._names)))
        return True

    def has(self, image_ref: str, credential: Credential) -> bool:
        """Whether this very credential is remembered for exactly this image."""
        return credential in self._of(_key(image_ref))

    def forget(self, image_ref: str, credential: Credential | None = None) -> bool:
        """Forget what was put for exactly this image (or only ``credential`` of it); whether
        there was something."""
        key = _key(image_ref)
        if credential is None:
            return self._drop(key)
        known = self._of(key)
        if credential not in known:
            return False
        known.remove(credential)
        if not known:
            self._drop(key)
        return True

    def _of(self, key: str) -> list[Credential]:
        name = self._names.get(key)
        return [] if name is None else self._by_name[name][key]

    def _drop(self, key: str) -> bool:
        name = self._names.pop(key, None)
        if name is None:
            return False
        del self._by_name[name][key]
        if not self._by_name[name]:
            del self._by_name[name]
        return True

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> list[tuple[str, list[Credential]]]:
        """What was put for each image, in full, the latest last."""
        return [(key, list(self._of(key))) for key in self._names]

    async def find(self, wanted: Wanted, *, fresh: bool) -> Sequence[Credential]:
        found: list[Credential] = []
        name = wanted.image
        while "/" in name:
            for credentials in reversed(self._by_name.get(name, {}).values()):
                found += reversed(credentials)
            name = name.rpartition("/")[0]
        return found


def _key(image_ref: str) -> str:
    """The reference in full; what is none (an image id) as it is, which is nobody's key."""
    try:
        return str(parse_reference(image_ref))
    except InvalidArgumentError:
        return image_ref
