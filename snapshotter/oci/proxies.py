"""HTTP(S)_PROXY and NO_PROXY: which proxy a URL goes through. Pure.

The rules are those of Go's `httpproxy`, so that Ember goes where containerd with the same
environment goes: an upper-case name wins over its lower-case form, a bare domain in NO_PROXY
means its subdomains too, networks are matched by address, this machine is never proxied.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from snapshotter.errors import ConfigError
from snapshotter.oci.hosts import is_local

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Proxy URLs by scheme (they may hold a password, so repr shows none), and who needs none."""

    http: str | None = None
    https: str | None = None
    exempt: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ProxySettings(exempt={self.exempt})"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ProxySettings:
        """Read HTTP_PROXY, HTTPS_PROXY, NO_PROXY or their lower-case forms."""
        found = {
            name: environment.get(name) or environment.get(name.lower()) or ""
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
        }
        exempt = tuple(
            part.strip().lower() for part in found["NO_PROXY"].split(",") if part.strip()
        )
        return cls(
            _proxy(found["HTTP_PROXY"], "HTTP_PROXY"),
            _proxy(found["HTTPS_PROXY"], "HTTPS_PROXY"),
            exempt,
        )

    def proxy_of(self, url: str) -> str | None:
        """The proxy for ``url``, None for a direct connection."""
        parts = urlsplit(url)
        proxy = self.https if parts.scheme == "https" else self.http
        host = (parts.hostname or "").lower()
        if proxy is None or not host or is_local(parts.netloc):
            return None
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
        if any(_is_exempt(host, port, entry) for entry in self.exempt):
            return None
        return proxy


def _proxy(text: str, name: str) -> str | None:
    if not text:
        return None
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises ValueError if it is not a number
    except ValueError:
        raise ConfigError(f"{name}: not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{name}: only http and https proxies are supported, not {parts.scheme!r}"
        )
    return url


def _is_exempt(host: str, port: int, entry: str) -> bool:
    if entry == "*":
        return True
    network = _network(entry)
    address = _address(host)
    if network is not None:
        return address is not None and address in network
    name, colon, wanted_port = entry.rpartition(":")
    if colon and wanted_port.isdecimal() and not name.endswith(":"):
        if int(wanted_port) != port:
            return False
        entry = name
    entry = entry.strip("[]").removeprefix("*")
    if entry.startswith("."):
        return host.endswith(entry)
    if address is not None:
        return address == _address(entry)
    return host == entry or host.endswith(f".{entry}")


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in entry:
        return None
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
