"""Puts a registry client together; the one place that shows the order of its wrappers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.clock import Clock
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.transport import HttpTransport, TransportLimits


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """What an operator may set. ``plain_http`` names registries (``host[:port]``) without TLS."""

    certs_dirs: tuple[Path, ...] = (Path("/etc/containerd/certs.d"),)
    plain_http: tuple[str, ...] = ()
    limits: TransportLimits = field(default_factory=TransportLimits)


def open_registry(settings: RegistrySettings, clock: Clock) -> RegistryClient:
    """A client for all registries; `RegistryClient.close` it."""
    transport = HttpTransport(settings.limits)
    book = HostBook(clock, settings.certs_dirs, settings.plain_http)
    return RegistryClient(transport, book, clock, transport.close)
