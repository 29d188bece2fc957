"""containerd's configuration file, as far as it concerns a snapshotter. Pure but for reading.

Files of version 1, 2 and 3 call the same settings by other names, and a file may import others
(globs too, relative to itself; what is read later wins). What containerd has running may differ.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.errors import ConfigError

DEFAULT_PATH = Path("/etc/containerd/config.toml")
MAX_FILES = 64
OLD_CRI = "io.containerd.grpc.v1.cri"
NEW_CRI = "io.containerd.cri.v1.images"
TRANSFER = "io.containerd.transfer.v1.local"
Table = Mapping[str, Any]


@dataclass(slots=True)
class ContainerdConfig:
    """``proxies`` by name; ``cri``: the table that has ``snapshotter``; ``unpacks_into``: the
    transfer service's snapshotters, None: its default; ``ignored``: tables of another version."""

    path: Path
    version: int
    proxies: dict[str, Table] = field(default_factory=dict)
    cri: dict[str, Any] = field(default_factory=dict)
    unpacks_into: list[str] | None = None
    ignored: list[str] = field(default_factory=list)

    @property
    def cri_table(self) -> str:
        """Where this file sets what CRI does with images."""
        old = f'[plugins."{OLD_CRI}".containerd]' if self.version == 2 else "[plugins.cri]"
        return f'[plugins."{NEW_CRI}"]' if self.version >= 3 else old


def load(path: Path) -> ContainerdConfig:
    """``path`` and all that it imports; ConfigError names the file that cannot be used."""
    table = _read(path)
    config = ContainerdConfig(path, _version(table))
    waiting, seen = [(path, table)], {path}
    while waiting:
        at, table = waiting.pop(0)
        _add(config, at, table)
        for name in _imported(at, table):
            if name not in seen and len(seen) < MAX_FILES:
                seen.add(name)
                waiting.append((name, _read(name)))
    return config


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _imported(path: Path, table: Table) -> list[Path]:
    found: list[Path] = []
    imports = table.get("imports")
    for pattern in imports if isinstance(imports, list) else []:
        text = str(path.parent / str(pattern))
        found += sorted(Path("/").glob(text.lstrip("/"))) if "*" in text else [Path(text)]
    return found


def _version(table: Table) -> int:
    version = table.get("version", 1)
    return version if isinstance(version, int) else 1


def _sub(table: Any, *keys: str) -> dict[str, Any]:
    """The table at ``keys``; empty where there is none."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _add(config: ContainerdConfig, path: Path, table: Table) -> None:
    version, plugins = _version(table), _sub(table, "plugins")
    config.proxies.update(_sub(table, "proxy_plugins"))
    old, new = _sub(plugins, OLD_CRI, "containerd"), _sub(plugins, NEW_CRI)
    if version >= 3:
        config.cri.update(new)
        stray, why = (OLD_CRI, old), "before version 3"
        units = _sub(plugins, TRANSFER).get("unpack_config")
        if isinstance(units, list):
            names = [str(unit.get("snapshotter", "")) for unit in units if isinstance(unit, dict)]
            config.unpacks_into = (config.unpacks_into or []) + names
    else:
        if version == 1:
            old = _sub(plugins, "cri", "containerd")
        if old:
            config.cri = dict(old)  # 1.x takes the later file's table whole
        stray, why = (NEW_CRI, new), "since version 3"
    if stray[1]:
        config.ignored.append(f'{path} is of version {version}: [plugins."{stray[0]}"] is {why}')
