"""The configuration file: TOML in, one checked and frozen value out.

Every key has a default that suits a node with containerd and a registry, so an empty file is valid.
What is unknown or wrong is named with file and key. Parts never see this module: the daemon hands
each of them the few values that it needs.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from snapshotter.errors import ConfigError

DEFAULT_PATH = Path("/etc/ember/config.toml")
STATE_PATH_BYTES = 90
"""Sockets live in it, and the kernel takes 107 bytes for the path of one."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?(?:/s)?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _toml(value: bool) -> str:
    return str(value).lower()


def _bytes(value: object) -> object:
    """``"64MiB"``, ``"200MB/s"``, ``1048576`` → bytes (K: powers of 1000, Ki: of 1024)."""
    if isinstance(value, bool):
        raise ValueError(f"{_toml(value)} is not a size such as 64MiB, 2GB or a number of bytes")
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 64MiB, 2GB or a number of bytes")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _seconds(value: object) -> object:
    """``"110s"``, ``"5m"``, ``2.5`` → seconds."""
    if isinstance(value, bool):
        raise ValueError(f"{_toml(value)} is not a duration such as 500ms, 110s, 5m")
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(
            f"{value!r} is not a duration such as 500ms, 110s, 5m or a number of seconds"
        )
    return float(match[1]) * _SECONDS[match[2]]


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError(f"{str(path)!r} is not an absolute path")
    return path


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


def _nothing(value: object) -> object:
    """An empty text is no path."""
    return None if value == "" else value


def _socket(value: object) -> object:
    """The kubelet and crictl write ``unix:///run/x.sock``; here that is the path."""
    return value.removeprefix("unix://") if isinstance(value, str) else value


Socket = Annotated[AbsolutePath, BeforeValidator(_socket)]


def _registry(name: str) -> str:
    if not name or re.search(r"[/\s@]", name):
        raise ValueError(f"{name!r} is not a registry's host or host:port")
    return name


RegistryName = Annotated[str, AfterValidator(_registry)]


def _endpoint(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if address and not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} is not host:port, such as 127.0.0.1:9464")
    return address


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
SomeBytes = Annotated[Bytes, Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
SomeSeconds = Annotated[Seconds, Field(gt=0)]


class Section(BaseModel):
    """A table of the file: immutable, and no key that isn't known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Containerd(Section):
    """Where containerd is and what it calls this snapshotter."""

    address: Socket = Path("/run/containerd/containerd.sock")
    snapshotter: Annotated[str, Field(min_length=1)] = "ember"
    timeout: SomeSeconds = 3.0


class FirstPull(Section):
    """What happens when an image comes that has no index yet."""

    mode: Literal["auto", "stream", "overlay"] = "auto"
    budget: Seconds = 60.0
    assumed_rate: SomeBytes = 12_500_000
    parallel_layers: Annotated[int, Field(ge=1, le=64)] = 4
    index_when_idle: StrictBool = True


class Index(Section):
    """Indexes that others made: whose count, how they are looked for, and giving away our own."""

    trust: Literal["signed", "registry"] = "signed"
    trusted_keys: AbsolutePath = Path("/etc/ember/keys")
    lookup: StrictBool = True
    lookup_budget: Seconds = 1.5
    forget_misses: Seconds = 600.0
    push: StrictBool = False
    sign_key: Annotated[AbsolutePath | None, BeforeValidator(_nothing)] = None


class Registry(Section):
    """How origins are reached."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        """Credential providers need their configuration and their folder."""
        if (self.credential_provider_config is None) != (self.credential_provider_bin_dir is None):
            raise ValueError(
                "credential_provider_config and credential_provider_bin_dir go together"
            )
        return self

    hosts_dir: AbsolutePath = Path("/etc/containerd/certs.d")
    plain_http: tuple[RegistryName, ...] = ()
    docker_config: tuple[AbsolutePath, ...] = (Path("/root/.docker/config.json"),)
    credential_provider_config: AbsolutePath | None = None
    credential_provider_bin_dir: AbsolutePath | None = None
    connections_per_host: Annotated[int, Field(ge=1, le=256)] = 64
    connect_timeout: Annotated[Seconds, Field(gt=0)] = 10.0
    read_timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    decision_timeout: SomeSeconds = 3.0


class CriProxy(Section):
    """The image-service proxy that sees pod pull secrets; off unless an address is given."""

    address: Socket | None = None
    upstream: Socket | None = None


class Fetch(Section):
    """The road: how long a reader waits, and how much goes on at once."""

    miss_timeout: SomeSeconds = 300.0
    demand_slots: Annotated[int, Field(ge=1, le=1024)] = 32
    background_slots: Annotated[int, Field(ge=1, le=256)] = 16
    readahead: Bytes = 512 * 1024


class Completion(Section):
    """Fetching the rest of an image behind everything else."""

    enabled: StrictBool = True
    delay: Seconds = 30.0
    rate: Bytes = 10_000_000


class Cache(Section):
    """L1 on local disk."""

    ballast: Bytes = 64 * 1024 * 1024
    flush_interval: SomeSeconds = 5.0


class Lazy(Section):
    """The data path; ``off`` makes Ember a plain overlay snapshotter."""

    mode: Literal["auto", "off"] = "auto"
    mounts_wait: Seconds = 110.0


class Engine(Section):
    """How local I/O is done."""

    ring: Literal["auto", "io_uring", "threads"] = "auto"


class Metrics(Section):
    """Prometheus endpoint, as ``host:port``; empty: none."""

    address: Annotated[str, AfterValidator(_endpoint)] = ""


class Config(Section):
    """The whole file."""

    root: AbsolutePath = Path("/var/lib/ember")
    state: AbsolutePath = Path("/run/ember")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    containerd: Containerd = Containerd()
    first_pull: FirstPull = FirstPull()
    index: Index = Index()
    registry: Registry = Registry()
    cri_proxy: CriProxy = CriProxy()
    fetch: Fetch = Fetch()
    completion: Completion = Completion()
    cache: Cache = Cache()
    lazy: Lazy = Lazy()
    engine: Engine = Engine()
    metrics: Metrics = Metrics()

    @field_validator("state")
    @classmethod
    def _room_for_sockets(cls, state: Path) -> Path:
        if len(os.fsencode(state)) > STATE_PATH_BYTES:
            raise ValueError(f"longer than {STATE_PATH_BYTES} bytes: sockets in it need room")
        return state

    @property
    def socket(self) -> Path:
        """Where containerd and the command line reach the daemon."""
        return self.state / "ember.sock"


def _key(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in location)


_WORDS = {
    "extra_forbidden": "no such key (docs/configuration.md lists them all)",
    "tuple_type": 'must be a list, such as ["a", "b"]',
    "string_type": "must be text in quotes",
    "string_too_short": "must not be empty",
    "path_type": "must be a path in quotes",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a number that ends",
    "literal_error": "must be {expected}",
    "model_type": "must be a table",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
}
"""The library's errors in the words of a TOML file."""


def _fault(error: Mapping[str, Any]) -> str:
    words = _WORDS.get(error["type"])
    if words is None:
        return str(error["msg"]).removeprefix("Value error, ")
    return words.format(**error.get("ctx", {}))


def parse(text: str, source: str) -> Config:
    """Read TOML ``text``; ConfigError names ``source`` (the file) and every key that is wrong."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        faults = [f"{source}: {_key(fault['loc'])}: {_fault(fault)}" for fault in error.errors()]
        raise ConfigError("\n".join(faults)) from None


def differences(one: Section, other: Section, prefix: str = "") -> set[str]:
    """The keys, as ``fetch.miss_timeout``, whose values differ."""
    found = set()
    for name in type(one).model_fields:
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, Section) and isinstance(second, Section):
            found |= differences(first, second, f"{prefix}{name}.")
        elif first != second:
            found.add(f"{prefix}{name}")
    return found


def load(path: Path | None) -> Config:
    """The configuration at ``path``; None: the default file if it exists, else the defaults."""
    if path is None:
        if not DEFAULT_PATH.exists():
            return Config()
        path = DEFAULT_PATH
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}") from None
    return parse(text, str(path))
