"""Puts a registry client together; the one place that shows the order of its parts.

A request goes down: credentials are added (auth), redirects are followed without them, a place
that asked for quiet is left alone, and what is left goes on the wire. Credentials come from pulls
first, then Docker's files, then the kubelet's plugins, and last there is trying without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.clock import Clock
from snapshotter.errors import ConfigError
from snapshotter.oci.auth import AuthorizingSender
from snapshotter.oci.credentials import CredentialSource, MemoryCredentials
from snapshotter.oci.dockerconfig import DockerConfigSource
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.kubelet import KubeletPluginSource
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.programs import ProgramRunner
from snapshotter.oci.proxies import ProxySettings
from snapshotter.oci.ratelimit import RETRY_AFTER_LIMIT_S, CoolingSender
from snapshotter.oci.redirects import RedirectingSender
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.transport import HttpTransport


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """What an operator may set.

    ``plain_http`` names registries (``host[:port]``) without TLS. ``docker_configs`` are looked
    at in order. The kubelet's plugins need both the configuration and the folder of programs.
    ``longest_quiet_s`` is how long a registry that asks for quiet gets it at most.
    """

    certs_dirs: tuple[Path, ...] = (Path("/etc/containerd/certs.d"),)
    plain_http: tuple[str, ...] = ()
    docker_configs: tuple[Path, ...] = (Path("/root/.docker/config.json"),)
    kubelet_config: Path | None = None
    kubelet_programs_dir: Path | None = None
    limits: TransportLimits = field(default_factory=TransportLimits)
    user_agent: str = "ember"
    longest_quiet_s: float = RETRY_AFTER_LIMIT_S


def open_registry(
    settings: RegistrySettings,
    clock: Clock,
    *,
    pulls: MemoryCredentials | None = None,
    environment: Mapping[str, str] | None = None,
) -> RegistryClient:
    """A client for all registries; `RegistryClient.close` it.

    ``pulls`` holds what the CRI proxy learns. ``environment`` (default: the process's) gives the
    proxies, and is what credential programs run with. Raises ConfigError.
    """
    environment = os.environ if environment is None else environment
    given = MemoryCredentials("credentials given by hand")
    sources = [given, *([] if pulls is None else [pulls])]
    proxies = ProxySettings.from_environment(environment)
    transport = HttpTransport(
        settings.limits, proxy_of=proxies.proxy_of, user_agent=settings.user_agent
    )
    cooling = CoolingSender(transport, clock, settings.longest_quiet_s)
    redirecting = RedirectingSender(cooling, clock)
    sender = AuthorizingSender(
        redirecting, [*sources, *_configured_sources(settings, clock, environment)], clock
    )
    book = HostBook(clock, settings.certs_dirs, settings.plain_http)
    return RegistryClient(
        sender, book, clock, given=given, on_close=transport.close, insist=cooling.except_once
    )


def _configured_sources(
    settings: RegistrySettings, clock: Clock, environment: Mapping[str, str]
) -> list[CredentialSource]:
    runner = ProgramRunner(environment)
    sources: list[CredentialSource] = [
        DockerConfigSource(path, runner, clock) for path in settings.docker_configs
    ]
    config, programs_dir = settings.kubelet_config, settings.kubelet_programs_dir
    if (config is None) != (programs_dir is None):
        raise ConfigError(
            "kubelet credential providers need both their configuration and their folder"
        )
    if config is not None and programs_dir is not None:
        sources.append(KubeletPluginSource(config, programs_dir, runner, clock))
    return sources
