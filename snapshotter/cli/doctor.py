"""`ember doctor`: each line is what was looked at, what was found, and the way out.

Works without a daemon: whoever calls it has mostly just failed to start one. Exit code 1 if
something is broken; what only costs laziness or speed is a warning.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from ioengine.probe import probe
from ioengine.probe_lazy import probe_lazy
from snapshotter.config import Config
from snapshotter.errors import EmberError
from snapshotter.rpc.containerd import Containerd

CONTAINERD_CONFIG = Path("/etc/containerd/config.toml")
_MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}
_ROOM_BYTES = 2 * 1024**3
_DESCRIPTORS = 65_536


@dataclass(frozen=True, slots=True)
class Check:
    """``result`` is ok, warn or fail; ``way_out`` is empty where nothing needs to be done."""

    what: str
    result: str
    found: str
    way_out: str = ""


def _kernel(config: Config) -> Iterator[Check]:
    if os.geteuid() != 0:
        yield Check("permissions", "fail", f"uid {os.geteuid()}", "run it as root")
        return
    yield Check("permissions", "ok", "root")
    try:
        config.root.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".doctor-", dir=config.root))
    except OSError as error:
        yield Check("cache directory", "fail", str(error), "set `root` to a directory on ext4")
        return
    try:
        report, lazy = probe(directory), probe_lazy(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for tried in lazy.checks:
        result = "ok" if tried.passed else "warn"
        yield Check(tried.what, result, tried.seen, tried.way_out)
    found = lazy.path or "none: images are fetched whole"
    yield Check("data path", "ok" if lazy.path else "warn", found)
    for what, finding in (("io_uring", report.io_uring), ("O_DIRECT", report.direct)):
        yield Check(what, "ok" if finding.allowed else "warn", finding.reason, finding.way_out)


def _space(config: Config) -> Iterator[Check]:
    directory = config.root
    while not directory.exists():
        directory = directory.parent
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    text = f"{free / 1e9:.1f} GB free, {status.f_favail} inodes free under {directory}"
    if free < _ROOM_BYTES or (status.f_files > 0 and status.f_favail < 10_000):
        yield Check("space", "warn", text, "free some, or move `root` to a larger file system")
    else:
        yield Check("space", "ok", text)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= _DESCRIPTORS
    yield Check(
        "descriptors",
        "ok" if enough else "warn",
        f"{hard} at most",
        "" if enough else "each waiting read needs one: LimitNOFILE=1048576 in the unit",
    )


async def _ask(config: Config) -> str:
    containerd = Containerd(config.containerd.address, config.containerd.timeout)
    try:
        return await containerd.version()
    finally:
        await containerd.close()


def _containerd(config: Config) -> Iterator[Check]:
    address = config.containerd.address
    try:
        version = asyncio.run(_ask(config))
    except EmberError as error:
        yield Check("containerd", "fail", str(error), "start it, or set containerd.address")
    else:
        yield Check("containerd", "ok", f"{version} at {address}")
    if not CONTAINERD_CONFIG.exists():
        yield Check(
            "containerd's configuration",
            "warn",
            f"{CONTAINERD_CONFIG} does not exist",
            "docs/install.md has the lines that it needs",
        )
        return
    yield from _plugin(config)


def _plugin(config: Config) -> Iterator[Check]:
    what = "containerd's configuration"
    try:
        table = tomllib.loads(CONTAINERD_CONFIG.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        yield Check(what, "fail", f"{CONTAINERD_CONFIG}: {error}", "mend the file")
        return
    name = config.containerd.snapshotter
    plugin = table.get("proxy_plugins", {}).get(name)
    if plugin is None:
        found = f"no [proxy_plugins.{name}] in {CONTAINERD_CONFIG}"
        if table.get("imports"):
            found += f" (imports {table['imports']} not looked at)"
        yield Check(what, "warn", found, "docs/install.md has the lines that it needs")
        return
    if plugin.get("address") != str(config.socket):
        yield Check(
            what,
            "fail",
            f"[proxy_plugins.{name}] points at {plugin.get('address')!r}",
            f"set its address to {str(config.socket)!r}",
        )
        return
    yield Check(what, "ok", f"[proxy_plugins.{name}] points at {config.socket}")
    exported = plugin.get("exports", {}).get("enable_remote_snapshot_annotations") == "true"
    if not (exported or _cri_annotations(table)):
        yield Check(
            "image labels",
            "warn",
            "containerd sends none, so only `ember pull` is lazy",
            "disable_snapshot_annotations = false for CRI, or on containerd 2.1 and later"
            ' exports.enable_remote_snapshot_annotations = "true"',
        )
    else:
        yield Check("image labels", "ok", "containerd sends them")


def _cri_annotations(table: dict[str, Any]) -> bool:
    plugins = table.get("plugins", {})
    old = plugins.get("io.containerd.grpc.v1.cri", {}).get("containerd", {})
    new = plugins.get("io.containerd.cri.v1.images", {})
    return any(part.get("disable_snapshot_annotations") is False for part in (old, new))


def _daemon(config: Config) -> Iterator[Check]:
    if config.socket.exists():
        yield Check("daemon", "ok", f"{config.socket} is there; `ember status` says more")
    else:
        yield Check("daemon", "warn", f"no {config.socket}", "start it with `ember serve`")


def run(config: Config, as_json: bool) -> None:
    """Look at everything, print it, exit 1 if something is broken."""
    checks: list[Check] = []
    for part in (_kernel, _space, _containerd, _daemon):
        try:
            checks.extend(part(config))
        except OSError as error:
            checks.append(Check(part.__name__.strip("_"), "fail", str(error)))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for check in checks:
            way_out = f" → {check.way_out}" if check.way_out and check.result != "ok" else ""
            text = escape(f"{check.what}: {check.found}{way_out}")
            console.print(f"{_MARKS[check.result]} {text}")
    if any(check.result == "fail" for check in checks):
        raise typer.Exit(1)
