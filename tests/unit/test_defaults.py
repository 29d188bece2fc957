"""A part that is made without settings is the one that an empty configuration makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from snapshotter.chunks.space import SpaceLimits
from snapshotter.chunks.store import StoreConfig
from snapshotter.config import Config
from snapshotter.daemon import opening
from snapshotter.fetch import RoadLimits
from snapshotter.oci.assembly import RegistrySettings
from snapshotter.oci.limits import TransportLimits
from snapshotter.snapshots.snapshotter import SnapshotterConfig


def test_the_road_and_the_registries_have_their_defaults_in_one_sense(tmp_path: Path) -> None:
    config = Config(root=tmp_path)
    made = opening.road_limits(config)
    assert replace(made, most_of_one=None, stall_s=RoadLimits().stall_s) == RoadLimits()
    assert opening.transport_limits(config) == TransportLimits()
    assert opening.registry_settings(config) == RegistrySettings()


def test_the_store_and_the_snapshotter_have_their_defaults_in_one_sense(tmp_path: Path) -> None:
    config = Config(root=tmp_path)
    made = opening.store_config(config)
    assert made.space.keep_free_bytes <= SpaceLimits().keep_free_bytes
    assert replace(made, space=SpaceLimits()) == StoreConfig(tmp_path)
    assert made.space.ballast_bytes == SpaceLimits().ballast_bytes
    assert SnapshotterConfig().mounts_wait_s == config.lazy.mounts_wait


def test_a_small_file_system_keeps_a_share_of_itself_free(tmp_path: Path) -> None:
    limits = opening.space_limits(Config(root=tmp_path))
    assert 0 < limits.keep_free_bytes <= SpaceLimits().keep_free_bytes
