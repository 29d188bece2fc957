"""Credentials out of Docker's config.json: written there, or told by its credential helpers.

Format: docker/cli, config file and the credential helpers' protocol (`docker-credential-NAME get`).
A per-registry helper wins over what is written, which wins over the default store. Files are
looked at again when they change, so a rotated secret needs no restart.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.clock import Clock
from snapshotter.errors import ConfigError, EmberError, UnavailableError
from snapshotter.oci.credentials import Credential, Wanted
from snapshotter.oci.flights import Flights
from snapshotter.oci.patterns import match_image
from snapshotter.oci.programs import ProgramRunner
from snapshotter.oci.recollection import Recollection
from snapshotter.oci.reference import DOCKER_HUB

_HUB_SERVER = "https://index.docker.io/v1/"
_FILE_LIMIT_BYTES = 4 * 1024 * 1024
_RECHECK_S = 2.0
_HELPER_KEEP_S = 300.0
_NOTHING_KEEP_S = 30.0
_AGAIN_S = 5.0
_HELPER_TIMEOUT_S = 15.0
_TOKEN_USER = "<token>"


@dataclass(frozen=True, slots=True)
class DockerConfig:
    """The three parts of a config.json that matter here."""

    auths: dict[str, Any] = field(repr=False)
    helpers: dict[str, str]
    store: str


def parse_docker_config(data: bytes, path: Path) -> DockerConfig:
    """Parse a config.json (also containers' auth.json, also the inside of a dockerconfigjson
    secret). An entry is looked at only when it is needed: a bad one doesn't spoil the others."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not JSON") from None
    auths = _table(document, "auths", path)
    helpers = _table(document, "credHelpers", path)
    store = document.get("credsStore") or ""
    if not isinstance(store, str) or not all(isinstance(name, str) for name in helpers.values()):
        raise ConfigError(f"{path}: names of credential helpers must be strings")
    return DockerConfig(auths, helpers, store)


def _table(document: Any, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: not a JSON object")
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key!r} is not an object")
    return value


def parse_entry(entry: Any, server: str, path: Path) -> Credential:
    """One value of ``auths``; ConfigError names the file and the server, never the secret."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: auths[{server!r}] is not an object")
    words = {
        key: entry.get(key) or ""
        for key in ("username", "password", "auth", "identitytoken", "registrytoken")
    }
    if not all(isinstance(word, str) for word in words.values()):
        raise ConfigError(f"{path}: auths[{server!r}] holds something else than strings")
    username, password = words["username"], words["password"]
    if words["auth"]:
        try:
            pair = base64.b64decode(words["auth"], validate=True).decode()
            username, colon, password = pair.partition(":")
        except (binascii.Error, ValueError):
            colon = ""
        if not colon:
            raise ConfigError(f"{path}: 'auth' of auths[{server!r}] is not base64 of user:password")
        password = password.rstrip("\0")
    return Credential(username, password, words["identitytoken"], words["registrytoken"])


class DockerConfigSource:
    """A CredentialSource over one config.json; a file that is not there has nothing."""

    def __init__(self, path: Path, runner: ProgramRunner, clock: Clock) -> None:
        self._path = path
        self._runner = runner
        self._checked: Recollection[str, DockerConfig] = Recollection(clock, _RECHECK_S)
        self._parsed: tuple[object, DockerConfig] | None = None
        self._told: Recollection[tuple[str, str], tuple[Credential, ...]]
        self._told = Recollection(clock, _HELPER_KEEP_S)
        self._recent: Recollection[tuple[str, str], str | None]
        self._recent = Recollection(clock, _AGAIN_S)
        self._flights: Flights[tuple[Credential, ...]] = Flights()

    @property
    def name(self) -> str:
        return str(self._path)

    async def find(self, wanted: Wanted, *, fresh: bool) -> Sequence[Credential]:
        config = self._config(fresh)
        if config is None:
            return []
        helper = _best(config.helpers, wanted)
        if helper is not None:
            return await self._from_helper(config.helpers[helper], helper, fresh)
        written = _matching(config.auths, wanted)
        parsed = [parse_entry(config.auths[key], key, self._path) for key in written]
        found = [credential for credential in parsed if not credential.is_empty]
        if not found and config.store:
            server = written[0] if written else wanted.registry
            server = _HUB_SERVER if wanted.registry == DOCKER_HUB else server
            return await self._from_helper(config.store, server, fresh)
        return found

    def _config(self, fresh: bool) -> DockerConfig | None:
        known = self._checked.get("")
        if known is not None and not fresh:
            return known
        try:
            state = self._path.stat()
            stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
            if self._parsed is None or self._parsed[0] != stamp:
                if state.st_size > _FILE_LIMIT_BYTES:
                    raise ConfigError(f"longer than {_FILE_LIMIT_BYTES} bytes")
                self._parsed = (stamp, parse_docker_config(self._path.read_bytes(), self._path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"{error.strerror}") from None
        self._checked.put("", self._parsed[1])
        return self._parsed[1]

    async def _from_helper(self, helper: str, server: str, fresh: bool) -> tuple[Credential, ...]:
        """What the helper says, or said; it is not asked more often than every few seconds."""
        key = (helper, server)
        told = self._told.get(key)
        if told is not None and (not fresh or key in self._recent):
            return told
        failure = self._recent.get(key)
        if failure is not None:
            raise UnavailableError(failure)
        try:
            told = await self._flights.join(key, lambda: self._ask(helper, server))
        except EmberError as error:
            self._recent.put(key, str(error))
            raise
        self._recent.put(key, None)
        self._told.put(key, told, _HELPER_KEEP_S if told else _NOTHING_KEEP_S)
        return told

    async def _ask(self, helper: str, server: str) -> tuple[Credential, ...]:
        program = f"docker-credential-{helper}"
        if "/" in helper or not helper.isprintable():
            raise ConfigError(f"{helper[:60]!r} is not the name of a credential helper")
        ended = await self._runner.run(
            [program, "get"], server.encode(), timeout_s=_HELPER_TIMEOUT_S
        )
        if ended.status != 0:
            if b"credentials not found" in ended.output.lower():
                return ()
            raise UnavailableError(f"{program} ended with {ended.status}: {ended.error}")
        try:
            document = json.loads(ended.output)
            username, secret = document["Username"], document["Secret"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UnavailableError(f"{program}: its output is no credential") from None
        if not isinstance(username, str) or not isinstance(secret, str):
            raise UnavailableError(f"{program}: its output is no credential")
        if username == _TOKEN_USER:
            return (Credential(identity_token=secret),)
        return (Credential(username, secret),)


def _matching(table: dict[str, Any], wanted: Wanted) -> list[str]:
    """The keys that mean the wanted image, the most specific first."""
    ranked = []
    for key in table:
        rank = match_image(key, wanted.registry, wanted.repository)
        if rank is not None:
            ranked.append((rank, key))
    return [key for _, key in sorted(ranked, key=lambda item: item[0], reverse=True)]


def _best(table: dict[str, Any], wanted: Wanted) -> str | None:
    return next(iter(_matching(table, wanted)), None)
