"""Whether containerd and Ember are joined: what the running one says, its file where it is silent.

A running containerd tells what it has loaded, and CRI which snapshotter it uses; a file may have
been changed since, or lie elsewhere: its place is taken from the process's own command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.cli.checks.check import Check, broken, tried, weak, well
from snapshotter.cli.checks.containerd_config import DEFAULT_PATH, ContainerdConfig, load
from snapshotter.cli.checks.peer import listener, option_of
from snapshotter.config import Config
from snapshotter.errors import ConfigError, EmberError
from snapshotter.rpc import cri
from snapshotter.rpc.containerd import Containerd

REBASE = "rebase"
"""docs/adr/the-capability-rebase-is-not-offered.md says why."""
_LINES = "docs/install.md has the lines that it needs"
_RESTART = "then restart containerd"


@dataclass(frozen=True, slots=True)
class Live:
    """What containerd says of itself. ``exports``: of our plugin, None: it has none; ``by_cri``:
    whether CRI unpacks into ours, None: no CRI here; ``labels``: whether CRI sends them, if told.
    """

    version: str
    exports: Mapping[str, str] | None
    capabilities: Sequence[str]
    by_cri: bool | None
    images_at: Path | None
    labels: bool | None

    @property
    def generation(self) -> tuple[int, int]:
        """Major and minor version."""
        parts = self.version.removeprefix("v").split(".")
        numbers = [int(part) for part in parts[:2] if part.isdigit()]
        return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


async def _ask(config: Config) -> Live:
    containerd = Containerd(config.containerd.address, config.containerd.timeout)
    name = config.containerd.snapshotter
    try:
        version = await containerd.version()
        exports = await containerd.snapshotter_exports(name)
        place = await cri.image_root(containerd)
        served = place is not None
        return Live(
            version,
            exports,
            await containerd.snapshotter_capabilities(name),
            await cri.uses(containerd, name) if served else None,
            place,
            await cri.sends_labels(containerd) if served else None,
        )
    finally:
        await containerd.close()


def containerd(config: Config) -> Iterator[Check]:
    """The daemon, its plugin, its labels, CRI."""
    address, live = config.containerd.address, None
    try:
        live = asyncio.run(_ask(config))
    except EmberError as error:
        found = str(error).removeprefix("containerd at ")
        yield broken("containerd", found, "start it, or set containerd.address")
    else:
        yield well("containerd", f"{live.version} at {address}")
    file, path = None, config_path(address)
    try:
        file = load(path) if path.exists() else None
    except ConfigError as error:
        yield broken("containerd's configuration", str(error), "mend the file")
    for stray in file.ignored if file is not None else ():
        yield weak("containerd's configuration", stray, "`containerd config migrate` tells how")
    if live is not None:
        yield from _joined(config, live, file, path)
    else:
        yield from _written(config, file, path)


def config_path(address: Path) -> Path:
    """The file that the containerd at ``address`` was started with, or where it looks for one."""
    pid = listener(address)
    named = option_of(pid, "containerd", "--config", "-c", "-config") if pid else None
    return named or DEFAULT_PATH


def _joined(
    config: Config, live: Live, file: ContainerdConfig | None, path: Path
) -> Iterator[Check]:
    name = config.containerd.snapshotter
    what, table = "proxy plugin", f"[proxy_plugins.{name}]"
    if live.exports is None:
        if file is not None and name in file.proxies:
            found = f"{path} has {table}, but containerd runs without it"
            yield broken(what, found, "restart containerd, and see its log")
        else:
            found = f"containerd has no snapshotter {name!r}"
            yield broken(what, found, f"add {table} to {path}, {_RESTART}: {_LINES}")
        return
    if REBASE in live.capabilities:
        found = f"{table} has the capability {REBASE}, with which images come out wrong"
        yield broken(what, found, f"take it out of {path}, {_RESTART}")
    else:
        yield _address(config, live.exports.get("address", ""), path)
    yield from _labels(live, file)
    yield from _cri(config, live, file)


def _written(config: Config, file: ContainerdConfig | None, path: Path) -> Iterator[Check]:
    """What the file alone tells, while containerd is down."""
    name = config.containerd.snapshotter
    if file is None or name not in file.proxies:
        found = f"no [proxy_plugins.{name}] in {path}"
        yield weak("proxy plugin", found if path.exists() else f"there is no {path}", _LINES)
        return
    yield _address(config, str(file.proxies[name].get("address", "")), path)


def _address(config: Config, address: str, path: Path) -> Check:
    what, table = "proxy plugin", f"[proxy_plugins.{config.containerd.snapshotter}]"
    if address.removeprefix("unix://") == str(config.socket):
        return well(what, f"{table} points at {config.socket}")
    way_out = f"set its address in {path} to {str(config.socket)!r}, {_RESTART}"
    return broken(what, f"{table} points at {address!r}", way_out)


def _labels(live: Live, file: ContainerdConfig | None) -> Iterator[Check]:
    """Without labels only `ember pull` is lazy."""
    exports, written = live.exports or {}, file.cri if file is not None else {}
    exported = (
        live.generation >= (2, 1)
        and exports.get("enable_remote_snapshot_annotations") == "true"
        and not written.get("use_local_image_pull", False)
    )
    told = live.labels
    if told is None:
        told = written.get("disable_snapshot_annotations") is False
    if live.generation >= (2, 1):
        way_out = 'enable_remote_snapshot_annotations = "true" under exports of the proxy plugin'
    else:
        table = file.cri_table if file is not None else "CRI's containerd table"
        way_out = f"disable_snapshot_annotations = false in {table}"
    missing = "containerd sends none, so only `ember pull` is lazy"
    sent = exported or told
    yield tried("image labels", sent, "containerd sends them" if sent else missing, way_out)


def _place(config: Config, told: Path) -> Check:
    """Where the kubelet looks, to see how full the place of its images is."""
    if told.exists() and told.resolve() == config.root.resolve():
        return well("image place", f"the kubelet looks at {told}")
    found = f"the kubelet is told that images are in {told}, and they are in {config.root}"
    if told.name.startswith("io.containerd."):
        return weak("image place", found, f"ln -s {config.root} {told}")
    return weak("image place", found, f"set root under the plugin's exports, {_RESTART}")


def _cri(config: Config, live: Live, file: ContainerdConfig | None) -> Iterator[Check]:
    name = config.containerd.snapshotter
    if live.by_cri is None:
        yield well("CRI", "is not served by this containerd")
    else:
        found = "pods' images go to Ember" if live.by_cri else "pods' images go elsewhere"
        table = file.cri_table if file is not None else "CRI's table"
        yield tried("CRI", live.by_cri, found, f'snapshotter = "{name}" in {table}, {_RESTART}')
    if live.by_cri and live.images_at is not None:
        yield _place(config, live.images_at)
    if live.generation >= (2, 0):
        units = file.unpacks_into if file is not None else None
        taken = name in units if units is not None else False
        found = f"the transfer service unpacks into {', '.join(units or ['its default alone'])}"
        way_out = f"an unpack_config for {name} and one for overlayfs: {_LINES}"
        yield tried("transfer service", taken, found, way_out)
