"""Image references: text as people and containerd write it → registry, repository, tag, digest.

The grammar and the Docker Hub short forms are those of the distribution project's `reference`
package. Pure; knows nothing of hosts, mirrors or credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError

DOCKER_HUB = "docker.io"
DEFAULT_TAG = "latest"
_NAME_LIMIT = 255

_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_REGISTRY = re.compile(
    rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?", re.ASCII
)
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_IDENTIFIER = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is: ``registry/repository`` with a tag, a digest, or both (digest wins)."""

    registry: str
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    @property
    def name(self) -> str:
        """Registry and repository, the form that BlobRef.repository has."""
        return f"{self.registry}/{self.repository}"

    @property
    def identifier(self) -> str:
        """What a registry is asked for under ``manifests/``: the digest, else the tag."""
        if self.digest is not None:
            return str(self.digest)
        return self.tag or DEFAULT_TAG

    def with_digest(self, digest: Digest) -> Reference:
        """The same image, pinned."""
        return Reference(self.registry, self.repository, self.tag, digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"


def parse_reference(text: str) -> Reference:
    """Parse ``[registry/]repository[:tag][@digest]``; InvalidArgumentError says what is wrong.

    Without a registry it is Docker Hub (``nginx`` = ``docker.io/library/nginx:latest``).
    """
    if not text:
        raise InvalidArgumentError("image reference is empty")
    rest, at, digest_text = text.partition("@")
    digest = Digest.parse(digest_text) if at else None
    tag = None
    head, colon, tail = rest.rpartition(":")
    if colon and "/" not in tail:
        if not _TAG.fullmatch(tail):
            raise InvalidArgumentError(f"image reference {text[:300]!r}: bad tag {tail[:130]!r}")
        rest, tag = head, tail
    if _IDENTIFIER.fullmatch(rest):
        raise InvalidArgumentError(
            f"image reference {text[:300]!r}: 64 hex digits are an image id, not a name"
        )
    registry, repository = split_name(rest)
    if tag is None and digest is None:
        tag = DEFAULT_TAG
    return Reference(registry, repository, tag, digest)


def _is_registry(text: str) -> bool:
    """Whether ``text`` is ``host[:port]``, with a port that there is and an address that is one."""
    if not _REGISTRY.fullmatch(text):
        return False
    try:
        parts = urlsplit(f"//{text}")
        if text.startswith("["):
            IPv6Address(parts.hostname or "")
        return parts.port != 0
    except ValueError:
        return False


@lru_cache(1024)
def split_name(name: str) -> tuple[str, str]:
    """Split ``[registry/]repository`` and check both parts.

    The first component is a registry if it could not be a repository's: it has a dot, a colon,
    an upper-case letter, or is ``localhost``.
    """
    first, slash, rest = name.partition("/")
    if slash and (any(c in first for c in ".:") or first == "localhost" or first != first.lower()):
        registry, repository = first, rest
    else:
        registry, repository = DOCKER_HUB, name
    if registry == f"index.{DOCKER_HUB}":
        registry = DOCKER_HUB
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if not _is_registry(registry):
        raise InvalidArgumentError(f"image name {name[:300]!r}: bad registry {registry[:260]!r}")
    if not _REPOSITORY.fullmatch(repository):
        raise InvalidArgumentError(
            f"image name {name[:300]!r}: bad repository {repository[:260]!r} "
            "(lower-case letters, digits, separators . _ -)"
        )
    if len(registry) + 1 + len(repository) > _NAME_LIMIT:
        raise InvalidArgumentError(f"image name {name[:60]!r}…: longer than {_NAME_LIMIT} bytes")
    return registry, repository
