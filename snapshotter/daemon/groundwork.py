"""What the parts for images stand on: engine, data path, database, store, road, containerd.

All of it is opened in order and notes its own undoing; mounts and decisions come later.
"""

from __future__ import annotations

from dataclasses import dataclass

from ioengine.probe import EngineChoice
from snapshotter.chunks.store import ViewStore
from snapshotter.clock import Clock
from snapshotter.config import Config
from snapshotter.daemon import opening
from snapshotter.daemon.room import room_to_try
from snapshotter.daemon.undo import Undo
from snapshotter.fetch import Road
from snapshotter.image.index_writer import remove_leftovers
from snapshotter.imagefs import catalog as catalog_tables
from snapshotter.imagefs import verdicts
from snapshotter.imagefs.catalog import Catalog
from snapshotter.imagefs.datapath import DataPath
from snapshotter.imagefs.provenance import remove_strays
from snapshotter.imagefs.shelf import Shelf
from snapshotter.metrics import Metrics
from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.oci.registry import RegistryClient
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.leases import PullLeases
from snapshotter.snapshots import metastore
from snapshotter.snapshots.database import Database


@dataclass(slots=True)
class Groundwork:
    """The opened parts, by what they are."""

    engine: EngineChoice
    data_path: DataPath
    database: Database
    catalog: Catalog
    shelf: Shelf
    store: ViewStore
    registry: RegistryClient
    road: Road
    containerd: Containerd
    leases: PullLeases


async def open_groundwork(
    config: Config, clock: Clock, undo: Undo, pulls: PullCredentials, metrics: Metrics
) -> Groundwork:
    """Open all of it, or raise; what is open by then is in ``undo``."""
    with room_to_try(config.root):
        engine = opening.open_engine(config, undo)
        data_path = opening.open_data_path(config, undo)
        opening.keep_pulls(config, data_path, pulls)
    database = await Database.open(
        config.root / "ember.db", (metastore.SCHEMA, catalog_tables.PIECE, verdicts.PIECE)
    )
    undo.later(database.close)
    catalog = Catalog(database)
    await catalog.load()
    indexes = opening.directory(config, "index")
    remove_leftovers(indexes)
    remove_strays(indexes)
    shelf = Shelf(indexes, catalog.layers_of_view, catalog.origins)
    store = await opening.open_store(config, engine, clock, undo)
    registry = opening.open_origins(config, pulls, clock, undo)
    road = opening.open_road(config, store, shelf, registry, metrics, clock, undo)
    containerd = Containerd(config.containerd.address, config.containerd.timeout)
    undo.later(containerd.close)
    leases = PullLeases(containerd, opening.cache_name(config), clock)
    leases.start()
    undo.later(leases.stop)
    return Groundwork(
        engine,
        data_path,
        database,
        catalog,
        shelf,
        store,
        registry,
        road,
        containerd,
        leases,
    )
