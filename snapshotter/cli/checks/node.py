"""The node itself: kernel, rights, the cache's file system, room, and the daemon's own limits.

Nothing is left behind: what must be tried on a file system is tried in a directory that goes again,
and a cache directory that does not exist yet is not made.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ioengine.probe import ProbeReport, probe
from ioengine.probe_lazy import LazyProbe, probe_lazy
from snapshotter.cli.checks.check import Check, broken, tried, weak, well
from snapshotter.cli.checks.peer import descriptors_of, listener
from snapshotter.cli.connection import silence, unreachable
from snapshotter.config import Config

SCRATCH_PREFIX = ".doctor-"
_ROOM_BYTES = 2 * 1024**3
_ROOM_INODES = 10_000
_DESCRIPTORS = 65_536
_ANSWER_S = 5.0


def nearest(path: Path) -> Path:
    """``path``, or the directory above it that it would be made in."""
    while not path.is_dir():
        path = path.parent
    return path


def kernel(config: Config) -> Iterator[Check]:
    """What the kernel and the file system let Ember do, tried where the cache is or will be."""
    if os.geteuid() != 0:
        yield broken("permissions", f"this is user {os.geteuid()}", "run it as root")
        return
    place = nearest(config.root)
    if place != config.root:
        yield well("cache directory", f"{config.root} does not exist yet; tried in {place}")
    try:
        report, lazy = _try(place)
    except OSError as error:
        found = f"{place} cannot be written: {error.strerror}"
        yield broken("cache directory", found, "set `root` to a directory on ext4, xfs or btrfs")
        return
    for each in lazy.checks:
        yield tried(each.what, each.passed, each.seen, each.way_out)
    path = lazy.path or "none: images are fetched whole"
    yield tried("data path", lazy.path is not None, path, "see the lines above")
    for what, finding in (("io_uring", report.io_uring), ("O_DIRECT", report.direct)):
        yield tried(what, finding.allowed, finding.reason, finding.way_out)


def _try(place: Path) -> tuple[ProbeReport, LazyProbe]:
    """Both probes, in a directory of their own: a daemon may be probing beside it."""
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=place))
    try:
        return probe(scratch, shown=place), probe_lazy(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def space(config: Config) -> Iterator[Check]:
    """Room for bytes and files."""
    place = nearest(config.root)
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    counted = status.f_files > 0  # btrfs makes inodes as it needs them and counts none
    inodes = f", {status.f_favail} inodes free" if counted else ""
    text = f"{free / 1e9:.1f} GB free{inodes} under {place}"
    enough = free >= _ROOM_BYTES and not (counted and status.f_favail < _ROOM_INODES)
    yield tried("space", enough, text, "free some, or move `root` to a larger file system")


def daemon(config: Config) -> Iterator[Check]:
    """Whether a daemon answers, and how many reads may wait in it."""
    why = unreachable(config.socket)
    pid = listener(config.socket)
    if why:
        found, _, way_out = why.partition("; ")
        yield weak("daemon", found, way_out or "see its log")
    elif why := silence(config.socket, _ANSWER_S):
        found, _, way_out = why.partition("; ")
        yield broken("daemon", found, way_out)
    else:
        yield well("daemon", f"process {pid or 'of another container'} at {config.socket}")
    try:
        limit = descriptors_of(pid or "self")
    except OSError:
        return
    whose = "the daemon" if pid else "a daemon started from here"
    enough = limit is None or limit >= _DESCRIPTORS
    found = f"{whose} may open {'any number' if limit is None else limit}"
    way_out = "each waiting read needs one: LimitNOFILE=1048576 in the unit, or ulimit -n"
    yield tried("descriptors", enough, found, way_out)
