"""Credentials from the kubelet's credential-provider plugins (ECR, GCR, ACR and others).

The same configuration file and programs that the kubelet uses. Formats: kubelet.config.k8s.io
CredentialProviderConfig, and the plugins' exec protocol credentialprovider.kubelet.k8s.io.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from snapshotter.clock import Clock
from snapshotter.errors import ConfigError, EmberError, UnavailableError
from snapshotter.oci.credentials import Credential, Wanted
from snapshotter.oci.duration import parse_duration_s
from snapshotter.oci.flights import Flights
from snapshotter.oci.patterns import match_image
from snapshotter.oci.programs import ProgramRunner
from snapshotter.oci.recollection import Recollection

_API_VERSIONS = tuple(
    f"credentialprovider.kubelet.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1")
)
_PLUGIN_TIMEOUT_S = 60.0
_LEAST_KEEP_S = 60.0
_MOST_KEEP_S = 12 * 3600.0
_AGAIN_S = 10.0
_RECHECK_S = 10.0
_FILE_LIMIT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Provider:
    """One plugin of the configuration."""

    name: str
    match_images: tuple[str, ...]
    default_keep_s: float
    api_version: str
    args: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]

    def matches(self, wanted: Wanted) -> bool:
        return any(
            match_image(pattern, wanted.registry, wanted.repository) is not None
            for pattern in self.match_images
        )


@dataclass(frozen=True, slots=True, repr=False)
class _Told:
    """What a plugin answered: credentials by pattern, and for how long and what they hold."""

    auths: tuple[tuple[str, Credential], ...]
    scope: str
    keep_s: float


def parse_provider_config(data: bytes, path: Path) -> list[Provider]:
    """The plugins of one configuration file, YAML or JSON; ConfigError names file and provider.

    Plugins that want a pod's service account token are left out: there is no pod here.
    """
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: neither YAML nor JSON ({str(error)[:120]})") from None
    if not isinstance(document, dict) or document.get("kind") != "CredentialProviderConfig":
        raise ConfigError(f"{path}: not of the kind CredentialProviderConfig")
    entries = document.get("providers", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: 'providers' is not a list")
    providers = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: an entry of 'providers' is not a map")
        if not entry.get("tokenAttributes"):
            providers.append(_provider(entry, path))
    return providers


def _provider(entry: dict[str, Any], path: Path) -> Provider:
    name = entry.get("name")
    if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"{path}: {name!r} is not the name of a provider's program")
    where = f"{path}: provider {name!r}"
    if entry.get("apiVersion") not in _API_VERSIONS:
        raise ConfigError(f"{where}: apiVersion must be one of {', '.join(_API_VERSIONS)}")
    patterns, args = entry.get("matchImages") or [], entry.get("args") or []
    variables = entry.get("env") or []
    if not all(isinstance(items, list) for items in (patterns, args, variables)):
        raise ConfigError(f"{where}: matchImages, args and env must be lists")
    if not all(isinstance(item, str) for item in (*patterns, *args)):
        raise ConfigError(f"{where}: matchImages and args must hold strings")
    environment = []
    for variable in variables:
        pair = variable if isinstance(variable, dict) else {}
        if not isinstance(pair.get("name"), str) or not isinstance(pair.get("value"), str):
            raise ConfigError(f"{where}: an entry of env needs a name and a value")
        environment.append((pair["name"], pair["value"]))
    try:
        keep_s = parse_duration_s(entry.get("defaultCacheDuration") or "0")
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: defaultCacheDuration is not a duration") from None
    return Provider(
        name, tuple(patterns), keep_s, entry["apiVersion"], tuple(args), tuple(environment)
    )


def parse_response(output: bytes, provider: Provider) -> _Told:
    """What a plugin wrote; UnavailableError says what is wrong with it, never what it holds."""
    try:
        document = json.loads(output)
        auths = document.get("auth") or {}
        scope = document.get("cacheKeyType")
        told = document.get("cacheDuration")
        keep_s = provider.default_keep_s if told is None else parse_duration_s(told)
        pairs = [
            (pattern, Credential(entry.get("username") or "", entry.get("password") or ""))
            for pattern, entry in auths.items()
        ]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UnavailableError(f"provider {provider.name}: its answer is malformed") from None
    if document.get("apiVersion") != provider.api_version:
        raise UnavailableError(f"provider {provider.name}: it answers in another apiVersion")
    if scope not in ("Image", "Registry", "Global"):
        raise UnavailableError(f"provider {provider.name}: it names no cacheKeyType")
    return _Told(tuple(pairs), scope, min(max(keep_s, _LEAST_KEEP_S), _MOST_KEEP_S))


class KubeletPluginSource:
    """A CredentialSource over a provider configuration (a file or a folder of files)."""

    def __init__(
        self, config: Path, programs_dir: Path, runner: ProgramRunner, clock: Clock
    ) -> None:
        self._config = config
        self._programs_dir = programs_dir
        self._runner = runner
        self._providers: Recollection[str, list[Provider]] = Recollection(clock, _RECHECK_S)
        self._told: Recollection[tuple[str, str], _Told] = Recollection(clock, _LEAST_KEEP_S)
        self._recent: Recollection[tuple[str, str], str | None]
        self._recent = Recollection(clock, _AGAIN_S)
        self._flights: Flights[_Told] = Flights()

    @property
    def name(self) -> str:
        return "kubelet credential providers"

    async def find(self, wanted: Wanted, *, fresh: bool) -> Sequence[Credential]:
        ranked = []
        faults: list[EmberError] = []
        for provider in self._load():
            if not provider.matches(wanted):
                continue
            try:
                told = await self._ask(provider, wanted, fresh)
            except EmberError as error:
                faults.append(error)
                continue
            for pattern, credential in told.auths:
                rank = match_image(pattern, wanted.registry, wanted.repository)
                if rank is not None:
                    ranked.append((rank, credential))
        if faults and not ranked:
            raise faults[0]
        return [c for _, c in sorted(ranked, key=lambda item: item[0], reverse=True)]

    def _load(self) -> list[Provider]:
        providers = self._providers.get("")
        if providers is None:
            providers = []
            for path in self._files():
                try:
                    data = path.read_bytes()
                except OSError as error:
                    raise ConfigError(f"{path}: {error.strerror}") from None
                if len(data) > _FILE_LIMIT_BYTES:
                    raise ConfigError(f"{path}: longer than {_FILE_LIMIT_BYTES} bytes")
                providers += parse_provider_config(data, path)
            self._providers.put("", providers)
        return providers

    def _files(self) -> list[Path]:
        if self._config.is_dir():
            found = [p for p in self._config.iterdir() if p.suffix in (".json", ".yaml", ".yml")]
            return sorted(found)
        return [self._config]

    async def _ask(self, provider: Provider, wanted: Wanted, fresh: bool) -> _Told:
        """What the plugin says, or said; it is not run more often than every few seconds."""
        keys = [(provider.name, part) for part in (wanted.image, wanted.registry, "")]
        if not fresh or keys[0] in self._recent:
            told = next((t for t in map(self._told.get, keys) if t is not None), None)
            if told is not None:
                return told
        failure = self._recent.get(keys[0])
        if failure is not None:
            raise UnavailableError(failure)
        try:
            told = await self._flights.join(keys[0], lambda: self._run(provider, wanted))
        except EmberError as error:
            self._recent.put(keys[0], str(error))
            raise
        self._recent.put(keys[0], None)
        place = {"Image": 0, "Registry": 1, "Global": 2}[told.scope]
        self._told.put(keys[place], told, told.keep_s)
        return told

    async def _run(self, provider: Provider, wanted: Wanted) -> _Told:
        request = {
            "apiVersion": provider.api_version,
            "kind": "CredentialProviderRequest",
            "image": wanted.image,
        }
        ended = await self._runner.run(
            [str(self._programs_dir / provider.name), *provider.args],
            json.dumps(request).encode(),
            timeout_s=_PLUGIN_TIMEOUT_S,
            extra_environment=dict(provider.environment),
        )
        if ended.status != 0:
            raise UnavailableError(
                f"provider {provider.name} ended with {ended.status}: {ended.error}"
            )
        return parse_response(ended.output, provider)
