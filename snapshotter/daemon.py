"""The composition root: builds the parts, joins them, starts them in order, stops in reverse.

Order matters twice. The guard's orphans are settled before its first event is read, and what was
mounted is registered before that. The socket appears last: containerd is answered only when every
promise can be kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ioengine import mounts
from ioengine.probe import EngineChoice, choose_engine
from snapshotter.chunks.space import SpaceLimits
from snapshotter.chunks.store import StoreConfig, ViewStore
from snapshotter.clock import SystemClock
from snapshotter.config import Config
from snapshotter.content import Digest
from snapshotter.errors import ConfigError, FailedPreconditionError
from snapshotter.fetch import Road, RoadLimits
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_writer import remove_leftovers
from snapshotter.imagefs import catalog as catalog_tables
from snapshotter.imagefs.catalog import Catalog
from snapshotter.imagefs.completion import Completion
from snapshotter.imagefs.datapath import DataPath, stored_descriptors
from snapshotter.imagefs.decision import Decider, Policy
from snapshotter.imagefs.documents import ContainerdDocuments
from snapshotter.imagefs.idle_index import IdleIndexer
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts, Mounted
from snapshotter.imagefs.layers import Layers
from snapshotter.imagefs.metadata import MetadataImages
from snapshotter.imagefs.misses import MissPump
from snapshotter.imagefs.origin import RegistryOrigin
from snapshotter.imagefs.removal import Remover
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.transport import TransportLimits
from snapshotter.operations import DaemonOperations, Parts
from snapshotter.rpc import control, snapshots
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.server import RpcServer
from snapshotter.snapshots import metastore
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from snapshotter.tiers.registry import RegistryTier

log = logging.getLogger(__name__)


class Daemon:
    """One node's daemon. Life story: ``start``, serve, ``stop``; both may be called once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = SystemClock()
        self._undo = contextlib.AsyncExitStack()
        self._data_path: DataPath | None = None
        self._engine: EngineChoice | None = None
        self._decider: Decider

    def summary(self) -> str:
        """One line for the log and the service manager."""
        path = self._data_path.name if self._data_path is not None else None
        engine = self._engine.engine.name if self._engine is not None else "?"
        return f"{self._config.socket}, data path {path or 'none (images fetched whole)'}, {engine}"

    async def stop(self) -> None:
        """Stop in reverse; mounts, containers and the guard's descriptors stay."""
        await self._undo.aclose()

    async def start(self) -> None:
        """Bring everything up; an EmberError says what stands in the way, and nothing is left."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config, clock = self._config, self._clock
        started_s = clock.monotonic_s()
        self._take_lock()
        pool = ThreadPoolExecutor(4, thread_name_prefix="ember-work")
        self._later(asyncio.to_thread, pool.shutdown)
        choice = await self._open_engine()
        data_path = self._open_data_path()
        database = await Database.open(
            config.root / "ember.db", (metastore.SCHEMA, catalog_tables.PIECE)
        )
        self._later(database.close)
        catalog = Catalog(database)
        await catalog.load()
        shelf = Shelf(self._directory("index"), catalog.layers_of_view, catalog.origins)
        remove_leftovers(shelf.directory)
        store = await self._open_store(choice)
        registry = self._open_registry()
        road = self._open_road(store, shelf, registry)
        containerd = Containerd(config.containerd.address, config.containerd.timeout)
        self._later(containerd.close)

        def index_of(view: Digest) -> LayerIndex | None:
            sources = shelf.of_view(view)
            return sources[0].index if sources else None

        views = Views(
            store, road, data_path.guard, config.root / "views", config.state / "guarded", index_of
        )
        self._later(views.close)
        metadata = MetadataImages(self._directory("metadata"))
        layer_mounts = LayerMounts(
            config.state / "layers", views, metadata, pool, directio=data_path.directio
        )
        ingest = self._open_ingest(registry, views, shelf, catalog, pool)
        decider = self._open_decider(catalog, shelf, ingest, views, containerd, registry, data_path)
        completion = Completion(road, views.incomplete, clock, config.completion.delay)
        layers = Layers(decider, catalog, shelf, ingest, layer_mounts, views, clock)
        layers.when_mounted = completion.wake
        pump = await self._restore(data_path, layer_mounts, views, shelf, road)
        if config.completion.enabled:
            completion.start()
            self._later(completion.stop)
        remover = Remover(catalog, shelf, ingest, layer_mounts, views, metadata)
        operations = DaemonOperations(
            Parts(
                catalog=catalog,
                shelf=shelf,
                ingest=ingest,
                mounts=layer_mounts,
                remover=remover,
                decider=decider,
                store=store,
                road=road,
                misses=pump,
                data_path=data_path,
                containerd=containerd,
                registry=registry,
                snapshotter=config.containerd.snapshotter,
                engine=(choice.engine.name, choice.reason),
                clock=clock,
                started_s=started_s,
            )
        )
        await self._serve(database, layers, operations)

    def _open_decider(
        self,
        catalog: Catalog,
        shelf: Shelf,
        ingest: Ingest,
        views: Views,
        containerd: Containerd,
        registry: RegistryClient,
        data_path: DataPath,
    ) -> Decider:
        idle = IdleIndexer(containerd, ingest, shelf, self._clock)
        if self._config.first_pull.index_when_idle:
            idle.start()
            self._later(idle.stop)
        origin = RegistryOrigin(registry)
        self._decider = Decider(
            self._policy(data_path),
            catalog,
            shelf,
            ContainerdDocuments(containerd, origin),
            origin,
            ingest,
            views.complete,
            idle.want,
            self._clock,
        )
        return self._decider

    def _later(self, undo: Callable[..., object], *args: object) -> None:
        """Have ``undo(*args)`` run at the stop, before everything that was noted earlier."""

        async def run() -> None:
            try:
                result = undo(*args)
                if asyncio.iscoroutine(result):
                    await result
            except Exception:
                log.exception("stopping: %s failed", getattr(undo, "__qualname__", undo))

        self._undo.push_async_callback(run)

    def _directory(self, name: str) -> Path:
        path = self._config.root / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _take_lock(self) -> None:
        """Two daemons on one cache would undo each other's work: the second one goes away."""
        try:
            for directory in (self._config.root, self._config.state):
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            descriptor = os.open(self._config.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self._config.root} can't be used as cache: {error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise FailedPreconditionError(
                f"another daemon works on {self._config.root}; stop it, or set another root"
            ) from None
        self._later(os.close, descriptor)

    async def _open_engine(self) -> EngineChoice:
        wanted = self._config.engine.ring
        try:
            choice = choose_engine(
                self._config.root, prefer="uring" if wanted == "io_uring" else wanted
            )
        except OSError as error:
            raise ConfigError(f"engine.ring = {wanted!r}: {error}") from None
        self._engine = choice
        self._later(choice.engine.close)
        log.info("engine %s: %s", choice.engine.name, choice.reason)
        return choice

    def _open_data_path(self) -> DataPath:
        data_path = DataPath.open(
            self._config.root,
            self._config.state,
            wanted=self._config.lazy.mode != "off",
            stored=stored_descriptors(),
        )
        self._data_path = data_path
        self._later(data_path.close)
        for reason in data_path.reasons:
            log.info("data path %s: %s", data_path.name or "none", reason)
        return data_path

    async def _open_store(self, choice: EngineChoice) -> ViewStore:
        cache = self._config.cache
        settings = StoreConfig(
            self._config.root,
            upkeep_s=cache.flush_interval,
            space=SpaceLimits(ballast_bytes=cache.ballast),
        )
        store = ViewStore(settings, choice.engine, in_use=mounts.view_is_open, clock=self._clock)
        await store.start()
        self._later(store.close)
        return store

    def _open_registry(self) -> RegistryClient:
        settings = self._config.registry
        client = open_registry(
            RegistrySettings(
                certs_dirs=(settings.hosts_dir,),
                plain_http=settings.plain_http,
                docker_configs=settings.docker_config,
                kubelet_config=settings.credential_provider_config,
                kubelet_programs_dir=settings.credential_provider_bin_dir,
                limits=TransportLimits(
                    connections_per_host=settings.connections_per_host,
                    connect_s=settings.connect_timeout,
                    idle_s=settings.read_timeout,
                ),
            ),
            self._clock,
        )
        self._later(client.close)
        return client

    def _open_road(self, store: ViewStore, shelf: Shelf, registry: RegistryClient) -> Road:
        fetch, completion = self._config.fetch, self._config.completion
        road = Road(
            store,
            shelf,
            [RegistryTier(registry)],
            limits=RoadLimits(
                miss_timeout_s=fetch.miss_timeout,
                demand_slots=fetch.demand_slots,
                background_slots=fetch.background_slots,
                background_bytes_per_s=completion.rate or None,
            ),
            clock=self._clock,
        )
        self._later(road.close)
        return road

    def _open_ingest(
        self,
        registry: RegistryClient,
        views: Views,
        shelf: Shelf,
        catalog: Catalog,
        pool: ThreadPoolExecutor,
    ) -> Ingest:
        settings = self._config.first_pull

        def indexed(blob: Digest) -> None:
            for image in catalog.images_of_blob(blob):
                self._decider.forget(image.manifest)

        async def refused(blob: Digest, reason: str) -> None:
            await catalog.blame(blob, reason, self._clock.wall_ns())

        ingest = Ingest(
            registry,
            views.stage,
            shelf.directory,
            indexed,
            refused,
            pool,
            self._clock,
            settings.parallel_layers,
            settings.assumed_rate,
        )
        self._later(ingest.close)
        return ingest

    def _policy(self, data_path: DataPath) -> Policy:
        first_pull = self._config.first_pull
        no_path = None if data_path.name else "no lazy data path: " + "; ".join(data_path.reasons)
        return Policy(
            first_pull.mode, first_pull.budget, self._config.registry.decision_timeout, no_path
        )

    async def _restore(
        self,
        data_path: DataPath,
        layer_mounts: LayerMounts,
        views: Views,
        shelf: Shelf,
        road: Road,
    ) -> MissPump | None:
        """What an earlier daemon left mounted is known and guarded before anything is answered."""
        links = (self._config.root / "snapshots").glob("*/fs")
        for mounted in layer_mounts.restore(links):
            index = shelf.get(mounted.layer)
            if not mounted.guarded:
                continue
            if index is None:
                log.error("layer %s is mounted, but its index is gone", mounted.layer)
                continue
            if data_path.guard is None or not data_path.guard.adopted:
                await self._suspect(layer_mounts, mounted, views, index)
            await views.guard(index)
        if data_path.guard is None:
            return None
        pump = MissPump(data_path.guard, road, views, self._clock, self._config.fetch.miss_timeout)
        settling = asyncio.create_task(self._listen(pump), name="settle orphans")
        self._later(self._stop_listening, settling, pump)
        data_path.watch_keeper()
        return pump

    async def _suspect(
        self, layer_mounts: LayerMounts, mounted: Mounted, views: Views, index: LayerIndex
    ) -> None:
        if await views.complete(index) or mounted.suspect:
            return
        layer_mounts.mark_suspect(mounted)
        log.critical(
            "layer %s was mounted while no guard was there: what its readers saw may have been"
            " zeros. Its next container gets a new mount; restart those that run on it",
            mounted.layer,
        )

    async def _listen(self, pump: MissPump) -> None:
        """Answer the orphans first: new events would get the same numbers."""
        count = await pump.settle_orphans()
        if count:
            log.warning("%d reads that an earlier daemon left waiting were answered", count)
        pump.start()

    async def _stop_listening(self, settling: asyncio.Task[None], pump: MissPump) -> None:
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
        await pump.stop()

    async def _serve(
        self, database: Database, layers: Layers, operations: DaemonOperations
    ) -> None:
        snapshotter = Snapshotter(
            database,
            self._config.root,
            layers,
            SnapshotterConfig(mounts_wait_s=self._config.lazy.mounts_wait),
            self._clock,
        )
        await snapshotter.start()
        self._later(snapshotter.close)
        server = RpcServer(
            self._config.socket,
            [
                partial(snapshots.register, snapshots.SnapshotsService(snapshotter)),
                partial(control.register, control.ControlService(operations)),
            ],
        )
        await server.start()
        self._later(server.stop)
