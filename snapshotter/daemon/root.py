"""The daemon: its parts joined, started in order, stopped in reverse.

Order matters twice. What was mounted is guarded, and the numbers of a dead daemon's orphans are
kept, before the first new event is read. The socket appears last: containerd is answered only when
every promise can be kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from snapshotter.chunks.space import is_full
from snapshotter.clock import SystemClock
from snapshotter.config import Config
from snapshotter.content import BlobRef, Digest
from snapshotter.daemon import opening
from snapshotter.daemon.groundwork import Groundwork, open_groundwork
from snapshotter.daemon.indexes import Bench, Indexes, open_comparison, open_indexes, refuse
from snapshotter.daemon.undo import Undo
from snapshotter.errors import NoSpaceError, UnavailableError
from snapshotter.fetch import Road, SpreadStreams
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.completion import Completion
from snapshotter.imagefs.datapath import DataPath
from snapshotter.imagefs.decision import Decider
from snapshotter.imagefs.departures import Departures
from snapshotter.imagefs.documents import ContainerdDocuments
from snapshotter.imagefs.eviction import Evictor
from snapshotter.imagefs.idle_index import IdleIndexer
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.layers import Layers
from snapshotter.imagefs.metadata import MetadataImages
from snapshotter.imagefs.misses import MissPump
from snapshotter.imagefs.origin import RegistryOrigin
from snapshotter.imagefs.rates import Rates
from snapshotter.imagefs.removal import Remover
from snapshotter.imagefs.restore import restore
from snapshotter.imagefs.views import Views
from snapshotter.imagefs.warm import Warmer
from snapshotter.metrics import Metrics
from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.operations import DaemonOperations
from snapshotter.rpc import control, snapshots
from snapshotter.rpc.image_records import every_name
from snapshotter.rpc.server import RpcServer
from snapshotter.snapshots import records
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from snapshotter.status import Parts

log = logging.getLogger(__name__)

RECORD_S = 1.0
"""What a decision may take beside its timeout: to be written down."""


class Daemon:
    """One node's daemon. Life story: ``start``, serve, ``stop``; both may be called once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = SystemClock()
        self._undo = Undo()
        self._summary = "not started"
        self._data_path: DataPath | None = None

    def summary(self) -> str:
        """One line for the log and the service manager."""
        return self._summary

    def descriptors(self) -> dict[str, int]:
        """What a service manager should hold too, by name (sd_pid_notify_with_fds(3))."""
        return self._data_path.descriptors() if self._data_path is not None else {}

    async def stop(self) -> None:
        """Stop in reverse; mounts, containers and the guard's descriptors stay."""
        await self._undo.run()

    async def start(self) -> None:
        """Bring everything up; an EmberError says what stands in the way, and nothing is left."""
        try:
            await self._start()
        except OSError as error:
            await self.stop()
            if is_full(error):
                raise NoSpaceError(
                    f"no space left under {self._config.root} ({error}); free some: readers of what"
                    " is not here yet wait for the daemon"
                ) from error
            raise UnavailableError(f"the daemon can't start: {error}") from error
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        started_s = self._clock.monotonic_s()
        opening.take_lock(self._config, self._undo)
        pulls, metrics = PullCredentials(), Metrics()
        opening.serve_metrics(self._config, metrics, self._undo)
        ground = await open_groundwork(self._config, self._clock, self._undo, pulls, metrics)
        views, layer_mounts = self._open_mounts(ground)
        links = (self._config.root / "snapshots").glob("*/fs")
        await restore(
            links, ground.data_path, layer_mounts, views, ground.shelf, ground.catalog.names_of_blob
        )
        ingest, decider, indexes = await self._open_decider(ground, views, layer_mounts, metrics)
        layers = self._layers(ground, decider, ingest, layer_mounts, views, indexes)
        pump = self._listen(ground, views)
        if pump is not None:
            pump.waiting.publish(metrics)
        completion = self._open_completion(ground.road, views)
        layers.when_mounted = completion.wake
        remover = self._open_removal(ground, ingest, layer_mounts, views)
        blame = partial(refuse, ground.catalog, decider, self._clock)
        bench = Bench(ground, views, ingest, layer_mounts, remover, blame, metrics)
        completion.when_stuck = open_comparison(indexes, bench, self._clock, self._undo).suspect
        warmer = self._open_warmer(ground, ingest, decider, views, indexes)
        operations = DaemonOperations(
            Parts(
                catalog=ground.catalog,
                shelf=ground.shelf,
                ingest=ingest,
                mounts=layer_mounts,
                views=views,
                remover=remover,
                decider=decider,
                foreign=indexes.foreign,
                verdicts=indexes.verdicts,
                warmer=warmer,
                store=ground.store,
                road=ground.road,
                misses=pump,
                data_path=ground.data_path,
                containerd=ground.containerd,
                leases=ground.leases,
                forgotten=opening.look_for_forgotten(
                    self._config, ground.containerd, ground.database, self._clock, self._undo
                ),
                registry=ground.registry,
                snapshotter=self._config.containerd.snapshotter,
                engine=(ground.engine.engine.name, ground.engine.reason),
                clock=self._clock,
                started_s=started_s,
            )
        )
        await opening.serve_cri(self._config, pulls, self._undo)
        await self._serve(ground.database, layers, layer_mounts.sweep, operations)
        keeping_up = asyncio.create_task(layer_mounts.keep_up(), name="strays")
        self._undo.later(keeping_up.cancel)
        self._let_go(ground, remover, decider, layers)
        # Whoever waits for a first pull is told first: calls that wait would hold up the stop.
        self._undo.later(warmer.close)
        self._undo.later(ingest.close)
        self._data_path = ground.data_path
        ground.data_path.settle()
        path = ground.data_path.name or "none (images fetched whole)"
        self._summary = f"{self._config.socket}, data path {path}, {ground.engine.engine.name}"

    def _layers(
        self,
        ground: Groundwork,
        decider: Decider,
        ingest: Ingest,
        mounts: LayerMounts,
        views: Views,
        indexes: Indexes,
    ) -> Layers:
        catalog, shelf = ground.catalog, ground.shelf
        return Layers(decider, catalog, shelf, ingest, mounts, views, indexes.foreign, self._clock)

    def _pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        """Threads of their own: what containerd waits for must not queue behind what takes long."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"ember-{name}")
        self._undo.later(asyncio.to_thread, pool.shutdown)
        return pool

    def _open_mounts(self, ground: Groundwork) -> tuple[Views, LayerMounts]:
        config, shelf = self._config, ground.shelf

        def index_of(view: Digest) -> LayerIndex | None:
            sources = shelf.of_view(view)
            return sources[0].index if sources else None

        views = Views(
            ground.store,
            ground.road,
            ground.data_path.guard,
            config.root / "views",
            config.state / "guarded",
            index_of,
        )
        self._undo.later(views.close)
        metadata = MetadataImages(opening.directory(config, "metadata"))
        directio = ground.data_path.directio
        return views, LayerMounts(
            config.state / "layers",
            views,
            metadata,
            self._pool(4, "mounts"),
            self._pool(2, "images"),
            directio=directio,
        )

    async def _open_decider(
        self, ground: Groundwork, views: Views, mounts: LayerMounts, metrics: Metrics
    ) -> tuple[Ingest, Decider, Indexes]:
        config, clock, catalog = self._config, self._clock, ground.catalog

        async def refused(blob: Digest, diff_id: Digest, reason: str) -> None:
            await refuse(catalog, decider, clock, blob, diff_id, reason)

        ingest = Ingest(
            SpreadStreams(ground.registry, ground.road.origins, clock),
            views.stage,
            ground.shelf.directory,
            refused,
            self._pool(4, "indexers"),
            clock,
            config.first_pull.parallel_layers,
            Rates(config.first_pull.assumed_rate, clock),
            metrics.tier_bytes.labels("registry", "first_pull").inc,
        )
        self._undo.later(ingest.close)

        def index_another(view: Digest, blob: BlobRef) -> None:
            if catalog.fault(blob.digest, view) is None:
                with contextlib.suppress(UnavailableError):  # this daemon is stopping
                    ingest.start_index(blob, view)

        ground.shelf.index_another = index_another
        idle = IdleIndexer(ground.containerd, ingest, ground.shelf, clock, catalog.unpacked_layers)
        if config.first_pull.index_when_idle:
            idle.start()
            self._undo.later(idle.stop)

        indexes = await open_indexes(
            config, ground, ingest, mounts, self._pool(2, "arrivals"), metrics, clock, self._undo
        )

        async def here(index: LayerIndex) -> bool:
            return await views.whole(index.diff_id)

        origin = RegistryOrigin(ground.registry)
        decider = Decider(
            opening.policy(config, ground.data_path),
            catalog,
            ground.shelf,
            ContainerdDocuments(ground.containerd, origin),
            origin,
            ingest,
            indexes.foreign,
            here,
            idle.want,
            clock,
        )
        return ingest, decider, indexes

    def _open_warmer(
        self,
        ground: Groundwork,
        ingest: Ingest,
        decider: Decider,
        views: Views,
        indexes: Indexes,
    ) -> Warmer:
        warmer = Warmer(
            ground.catalog,
            ground.shelf,
            ingest,
            views,
            ground.road,
            RegistryOrigin(ground.registry),
            decider.hindrance,
            self._clock,
        )
        warmer.look_up = indexes.foreign.look_up
        return warmer

    def _open_removal(
        self, ground: Groundwork, ingest: Ingest, layer_mounts: LayerMounts, views: Views
    ) -> Remover:
        """What takes data away: an operator's wish, or a full disk."""

        def forget_origin(view: Digest) -> None:
            ground.road.forget_tally(view)
            ingest.forget_streamed(view)

        standing = partial(ground.database.read, records.lazy_layers)
        remover = Remover(
            ground.catalog,
            ground.shelf,
            ingest,
            layer_mounts,
            views,
            layer_mounts.metadata,
            standing,
            forget_origin,
        )
        evictor = Evictor(ground.catalog, views, remover, standing)
        ground.store.space.evict_with(evictor.evict)
        return remover

    def _listen(self, ground: Groundwork, views: Views) -> MissPump | None:
        guard = ground.data_path.guard
        if guard is None:
            return None
        fetch = self._config.fetch
        pump = MissPump(guard, ground.road, views, self._clock, fetch.miss_timeout, fetch.readahead)
        pump.start()
        self._undo.later(pump.stop)
        opening.watch_starvation(guard, self._clock, self._undo)
        ground.data_path.watch_keeper()
        return pump

    def _let_go(
        self, ground: Groundwork, remover: Remover, decider: Decider, layers: Layers
    ) -> None:
        """Images that were removed while they were in use go when they can."""
        named = partial(every_name, ground.containerd)
        departures = Departures(ground.catalog, remover, named, decider.forget, self._clock)
        layers.when_released = departures.wake
        departures.start()
        self._undo.later(departures.stop)

    def _open_completion(self, road: Road, views: Views) -> Completion:
        settings = self._config.completion
        completion = Completion(
            road, views.incomplete, self._clock, settings.delay, settings.rate or None
        )
        if settings.enabled:
            completion.start()
            self._undo.later(completion.stop)
        return completion

    async def _serve(
        self,
        database: Database,
        layers: Layers,
        sweep: Callable[[], Awaitable[None]],
        operations: DaemonOperations,
    ) -> None:
        snapshotter = Snapshotter(
            database,
            self._config.root,
            layers,
            SnapshotterConfig(
                mounts_wait_s=self._config.lazy.mounts_wait,
                claim_wait_s=self._config.registry.decision_timeout + RECORD_S,
            ),
            self._clock,
        )
        await snapshotter.start()
        self._undo.later(snapshotter.close)
        await sweep()
        server = RpcServer(
            self._config.socket,
            [
                partial(snapshots.register, snapshots.SnapshotsService(snapshotter)),
                partial(control.register, control.ControlService(operations)),
            ],
        )
        await server.start()
        self._undo.later(server.stop)
