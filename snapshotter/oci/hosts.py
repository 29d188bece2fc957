"""Where to ask for a registry's content: hosts.toml of containerd's certs.d, and the defaults.

Hosts are tried in the file's order, the registry itself (or ``server``) last. Format and directory
names: containerd, docs/hosts.md. A file that can't be read is an error and not "no mirrors": to
pass over a mirror that someone configured could leak requests to the outside.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from snapshotter.errors import ConfigError
from snapshotter.oci.duration import parse_duration_s
from snapshotter.oci.reference import DOCKER_HUB

DOCKER_HUB_HOST = "registry-1.docker.io"
_CAPABILITIES = frozenset({"pull", "resolve", "push", "referrers"})


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a host's TLS needs beyond the system's trust; all paths absolute."""

    ca: tuple[Path, ...] = ()
    client: tuple[tuple[Path, Path | None], ...] = ()
    skip_verify: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """One place that serves a registry's content.

    ``base`` is scheme, authority and path, to which ``/<repository>/…`` is added. ``namespace`` is
    the registry that a mirror is asked for (``ns=``), None if the host is that registry itself.
    """

    base: str
    authority: str
    capabilities: frozenset[str] = _CAPABILITIES
    namespace: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    tls: TlsFiles = TlsFiles()
    dial_timeout_s: float | None = None
    is_server: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is spoken to without TLS."""
        return self.base.startswith("http://")

    def __repr__(self) -> str:
        return f"Host({self.base})"


def is_local(authority: str) -> bool:
    """Whether ``host[:port]`` is this machine, the only place where plain HTTP is the default."""
    hostname = urlsplit(f"//{authority}").hostname or ""
    if hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return False


def default_host(registry: str, *, plain_http: bool, tls: TlsFiles | None = None) -> Host:
    """The registry itself, as its name says where it is."""
    authority = DOCKER_HUB_HOST if registry == DOCKER_HUB else registry
    port = urlsplit(f"//{authority}").port
    plain = plain_http or (is_local(authority) and port != 443)
    scheme = "http" if plain else "https"
    return Host(f"{scheme}://{authority}/v2", authority, tls=tls or TlsFiles())


def host_directory(roots: Sequence[Path], registry: str) -> Path | None:
    """The certs.d directory for ``registry``: ``host_port_``, ``host:port``, then ``_default``."""
    name, colon, port = registry.rpartition(":")
    names = [f"{name}_{port}_", registry] if colon and not port.endswith("]") else [registry]
    for root in roots:
        for candidate in (*names, "_default"):
            if (root / candidate).is_dir():
                return root / candidate
    return None


def load_hosts(roots: Sequence[Path], registry: str, *, plain_http: bool = False) -> list[Host]:
    """The hosts to ask for ``registry``, in order; ConfigError names the file and the key."""
    directory = host_directory(roots, registry)
    if directory is None:
        return [default_host(registry, plain_http=plain_http)]
    path = directory / "hosts.toml"
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return [default_host(registry, plain_http=plain_http, tls=_docker_certificates(directory))]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    return parse_hosts(document, path, registry, plain_http=plain_http)


def parse_hosts(
    document: Mapping[str, Any], path: Path, registry: str, *, plain_http: bool = False
) -> list[Host]:
    """The hosts in a parsed hosts.toml, the server last."""
    tables = document.get("host", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: 'host' must be tables such as [host.\"https://mirror\"]")
    hosts = [_host(url, table, path, registry, False) for url, table in tables.items()]
    server = document.get("server")
    if server is None or server == "":
        default = default_host(registry, plain_http=plain_http)
        server = default.base.removesuffix("/v2")
    elif not isinstance(server, str):
        raise ConfigError(f"{path}: 'server' must be a URL")
    root = {key: value for key, value in document.items() if key not in ("server", "host")}
    hosts.append(_host(server, root, path, registry, True))
    return hosts


def _host(url: str, table: Any, path: Path, registry: str, is_server: bool) -> Host:
    where = f"{path}: {'server' if is_server else 'host'} {url!r}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: a table was expected")
    parts = _split(url, where)
    override = table.get("override_path", False)
    root = parts.path.rstrip("/")
    if not root.endswith("/v2") and not override:
        root += "/v2"
    authority = DOCKER_HUB_HOST if parts.netloc == DOCKER_HUB else parts.netloc
    own = DOCKER_HUB_HOST if registry == DOCKER_HUB else registry
    return Host(
        base=f"{parts.scheme}://{authority}{root}",
        authority=authority,
        capabilities=_capabilities(table.get("capabilities"), where),
        namespace=None if authority == own else registry,
        headers=_headers(table.get("header"), where),
        tls=TlsFiles(
            ca=_paths(table.get("ca"), path.parent, f"{where}: 'ca'"),
            client=_pairs(table.get("client"), path.parent, f"{where}: 'client'"),
            skip_verify=_flag(table.get("skip_verify", False), f"{where}: 'skip_verify'"),
        ),
        dial_timeout_s=_dial_timeout_s(table.get("dial_timeout"), where),
        is_server=is_server,
    )


def _split(url: str, where: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        parts.port  # noqa: B018  raises ValueError if it is not a number
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if parts.scheme not in ("http", "https") or not _is_host(parts):
        raise ConfigError(f"{where}: not an http or https URL")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{where}: a URL with user, query or fragment; use 'header' for secrets")
    return parts


def _is_host(parts: SplitResult) -> bool:
    return bool(parts.hostname) and not any(c.isspace() or c in "%\\" for c in parts.netloc)


def _capabilities(value: Any, where: str) -> frozenset[str]:
    if value is None or value == []:
        return _CAPABILITIES
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where}: 'capabilities' must be a list of strings")
    found = frozenset(item.lower() for item in value)
    unknown = sorted(found - _CAPABILITIES)
    if unknown:
        raise ConfigError(f"{where}: unknown capability {unknown[0]!r}")
    return found


def _headers(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: 'header' must be a table")
    pairs = []
    for name, content in value.items():
        for item in content if isinstance(content, list) else [content]:
            if not isinstance(item, str) or any(c in item + name for c in "\r\n\0"):
                raise ConfigError(f"{where}: header {name!r} must be a string or a list of them")
            pairs.append((name, item))
    return tuple(pairs)


def _paths(value: Any, base: Path, where: str) -> tuple[Path, ...]:
    items = [value] if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where} must be a path or a list of paths")
    return tuple(base / item for item in items)


def _pairs(value: Any, base: Path, where: str) -> tuple[tuple[Path, Path | None], ...]:
    items = [value] if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, list):
        raise ConfigError(f"{where} must be a path, a list of paths, or a list of pairs of paths")
    pairs: list[tuple[Path, Path | None]] = []
    for item in items:
        names = [item] if isinstance(item, str) else item
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{where} must hold paths or pairs of paths")
        if len(names) not in (1, 2) or (len(names) == 1 and not isinstance(item, str)):
            raise ConfigError(f"{where}: a pair is [certificate, key]")
        key = base / names[1] if len(names) == 2 and names[1] else None
        pairs.append((base / names[0], key))
    return tuple(pairs)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false")
    return value


def _dial_timeout_s(value: Any, where: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        return parse_duration_s(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: 'dial_timeout' must be a duration such as \"2s\"") from None


def _docker_certificates(directory: Path) -> TlsFiles:
    """The older layout of the directory: ``*.crt`` are CAs, ``*.cert`` with ``*.key`` clients."""
    pairs = []
    for certificate in sorted(directory.glob("*.cert")):
        key = certificate.with_suffix(".key")
        pairs.append((certificate, key if key.exists() else None))
    return TlsFiles(ca=tuple(sorted(directory.glob("*.crt"))), client=tuple(pairs))
