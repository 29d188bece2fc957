"""How each part is made from the configuration; every function notes its own undoing.

Only values go in: a part never sees the configuration itself. Faults of the machine come out as
errors that name the key to change.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import start_http_server

from ioengine import mounts
from ioengine.guard import Guard
from ioengine.probe import EngineChoice, choose_engine
from snapshotter.chunks.space import SpaceLimits
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.clock import Clock
from snapshotter.config import Config
from snapshotter.daemon.undo import Undo
from snapshotter.errors import ConfigError, FailedPreconditionError
from snapshotter.fetch import Road, RoadLimits
from snapshotter.imagefs.datapath import DataPath, stored_descriptors
from snapshotter.imagefs.decision import Policy
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.starved import Starvation
from snapshotter.metrics import Metrics
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.oci.registry import RegistryClient
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.cri_proxy import CriProxy
from snapshotter.rpc.forgotten import Forgotten
from snapshotter.rpc.server import RpcServer
from snapshotter.snapshots import records
from snapshotter.snapshots.database import Database
from snapshotter.tiers.hedged import HedgedTier
from snapshotter.tiers.registry import RegistryTier

log = logging.getLogger(__name__)

PULL_SECRETS = "pull-secrets"
PULL_SECRETS_BYTES = 2 * 1024 * 1024
QUIET_SHARE = 0.75
"""The share of a reader's patience that one answer of a registry may take: it asks once more."""
HOSTS_TRIED = 4
"""So many silent hosts (mirrors, storage, token services) one read may have to pass by."""


def directory(config: Config, name: str) -> Path:
    """A directory of the cache, for root alone."""
    path = config.root / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def take_lock(config: Config, undo: Undo) -> None:
    """Two daemons on one cache would undo each other's work: the second one goes away.

    So would two on one state directory: they would share mounts, and the guard that answers reads.
    """
    for key, path in (("root", config.root), ("state", config.state)):
        try:
            path.mkdir(mode=0o711, parents=True, exist_ok=True)
            descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what = "as cache" if key == "root" else "for what is of this boot"
            raise ConfigError(f"{path} can't be used {what}: {error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise FailedPreconditionError(
                f"another daemon works on {path}; stop it, or set another {key}"
            ) from None
        undo.later(os.close, descriptor)


def cache_name(config: Config) -> str:
    """A name that no other cache has, kept in this one: what bears it elsewhere is ours."""
    path = config.root / "name"
    with contextlib.suppress(FileNotFoundError):
        known = path.read_text(encoding="ascii", errors="replace").strip()
        if known:  # else the power went before it was written
            return known
    name = secrets.token_hex(16)
    path.write_text(f"{name}\n", encoding="ascii")
    return name


def open_engine(config: Config, undo: Undo) -> EngineChoice:
    """The I/O engine; ConfigError if the wanted one can't be had."""
    wanted = config.engine.ring
    try:
        choice = choose_engine(config.root, prefer="uring" if wanted == "io_uring" else wanted)
    except OSError as error:
        raise ConfigError(f"engine.ring = {wanted!r}: {error}") from None
    undo.later(choice.engine.close)
    log.info("engine %s: %s", choice.engine.name, choice.reason)
    return choice


def open_data_path(config: Config, undo: Undo) -> DataPath:
    """The lazy data path, or none with the reasons why."""
    data_path = DataPath.open(
        config.root,
        config.state,
        wanted=config.lazy.mode != "off",
        stored=stored_descriptors(),
    )
    undo.later(data_path.close)
    for reason in data_path.reasons:
        log.info("data path %s: %s", data_path.name or "none", reason)
    return data_path


def keep_pulls(config: Config, data_path: DataPath, pulls: PullCredentials) -> None:
    """Take over the pull secrets that an earlier daemon saw, and keep what this one sees."""
    wanted = config.cri_proxy.address is not None
    memory = data_path.memory(PULL_SECRETS, PULL_SECRETS_BYTES, make=wanted)
    data_path.let_go_of_stored()
    if memory is not None:
        pulls.keep_on(memory)


async def open_store(config: Config, choice: EngineChoice, clock: Clock, undo: Undo) -> ViewStore:
    """L1."""
    settings = store_config(config)
    store = ViewStore(settings, choice.engine, in_use=mounts.view_is_open, clock=clock)
    await store.start()
    undo.later(store.close)
    return store


def store_config(config: Config) -> StoreConfig:
    """How L1 is kept."""
    return StoreConfig(
        config.root, upkeep_s=config.cache.flush_interval, space=space_limits(config)
    )


def space_limits(config: Config) -> SpaceLimits:
    """A small file system keeps a share of itself free: what is usual would be most of it."""
    status = os.statvfs(config.root)
    share = status.f_blocks * status.f_frsize // 16
    usual = SpaceLimits(ballast_bytes=config.cache.ballast)
    return replace(usual, keep_free_bytes=min(usual.keep_free_bytes, share))


def open_origins(
    config: Config, pulls: PullCredentials, clock: Clock, undo: Undo
) -> RegistryClient:
    """The client of all registries; ``pulls`` are the credentials that the CRI proxy learns."""
    client = open_registry(registry_settings(config), clock, pulls=pulls)
    undo.later(client.close)
    return client


def registry_settings(config: Config) -> RegistrySettings:
    """Where credentials, mirrors and certificates are looked for."""
    settings = config.registry
    return RegistrySettings(
        certs_dirs=(settings.hosts_dir,),
        plain_http=settings.plain_http,
        docker_configs=settings.docker_config,
        kubelet_config=settings.credential_provider_config,
        kubelet_programs_dir=settings.credential_provider_bin_dir,
        limits=transport_limits(config),
        longest_quiet_s=QUIET_SHARE * config.fetch.miss_timeout,
    )


def transport_limits(config: Config) -> TransportLimits:
    """How long a host may take, and how many connections it gets."""
    return TransportLimits(
        connections_per_host=config.registry.connections_per_host,
        connect_s=config.registry.connect_timeout,
        idle_s=config.registry.read_timeout,
    )


def road_limits(config: Config) -> RoadLimits:
    """A view whose storage hangs must leave room for the others, in slots and in connections.

    The registry goes from a silent mirror on to the next host by itself, and remembers it: a tier
    gets more patience than that takes, or the read would end before it comes to that.
    """
    fetch, registry = config.fetch, config.registry
    return RoadLimits(
        miss_timeout_s=fetch.miss_timeout,
        demand_slots=fetch.demand_slots,
        background_slots=min(fetch.background_slots, max(1, registry.connections_per_host // 2)),
        most_of_one=max(1, registry.connections_per_host // 2),
        stall_s=HOSTS_TRIED * (registry.connect_timeout + registry.read_timeout),
    )


def open_road(
    config: Config,
    store: ViewStore,
    shelf: Shelf,
    registry: RegistryClient,
    metrics: Metrics,
    clock: Clock,
    undo: Undo,
) -> Road:
    """The one road."""
    origin = HedgedTier(
        RegistryTier(registry),
        RegistryTier(registry, elsewhere=True),
        clock,
        lagging=registry.lagging,
        again=metrics.hedged_reads.inc,
    )
    road = Road(
        store,
        shelf,
        [origin],
        limits=road_limits(config),
        clock=clock,
        metrics=metrics,
    )
    undo.later(road.close)
    return road


def policy(config: Config, data_path: DataPath) -> Policy:
    """What decides whether an image is lazy."""
    no_path = None if data_path.name else "no lazy data path: " + "; ".join(data_path.reasons)
    first_pull = config.first_pull
    return Policy(first_pull.mode, first_pull.budget, config.registry.decision_timeout, no_path)


async def serve_cri(config: Config, pulls: PullCredentials, undo: Undo) -> None:
    """The CRI image-service proxy, if it is wanted: it sees the pull secrets of pods."""
    settings = config.cri_proxy
    if settings.address is None:
        return
    proxy = CriProxy(settings.upstream or config.containerd.address, pulls)
    undo.later(proxy.close)
    server = RpcServer(settings.address, [proxy.register], generic=True)
    await server.start()
    undo.later(server.stop)
    log.info("CRI image service proxy on %s", settings.address)


def serve_metrics(config: Config, metrics: Metrics, undo: Undo) -> None:
    """The Prometheus endpoint, if an address is set."""
    address = config.metrics.address
    if not address:
        return
    host, _, port = address.rpartition(":")
    try:
        server, _ = start_http_server(int(port), host or "127.0.0.1", metrics.registry)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"metrics.address = {address!r}: {error}") from None
    undo.later(server.shutdown)


def look_for_forgotten(
    config: Config, containerd: Containerd, database: Database, clock: Clock, undo: Undo
) -> Forgotten:
    """What containerd believes to be here and is not."""
    known = partial(database.read, records.committed_chain_ids)
    forgotten = Forgotten(containerd, config.containerd.snapshotter, known, clock)
    forgotten.start()
    undo.later(forgotten.stop)
    return forgotten


def watch_starvation(guard: Guard, clock: Clock, undo: Undo) -> None:
    """Readers of whom nobody knows are told of."""
    starvation = Starvation(guard, clock)
    starvation.start()
    undo.later(starvation.stop)
