"""containerd's configuration file: its three versions, and files that import files."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.cli.checks.containerd_config import ContainerdConfig, load
from snapshotter.errors import ConfigError

PLUGIN = '[proxy_plugins.ember]\ntype = "snapshot"\naddress = "/run/ember/ember.sock"\n'
OLD = '[plugins."io.containerd.grpc.v1.cri".containerd]\n'
NEW = '[plugins."io.containerd.cri.v1.images"]\n'
OURS = 'snapshotter = "ember"\ndisable_snapshot_annotations = false\n'
UNIT = '[[plugins."io.containerd.transfer.v1.local".unpack_config]]\nsnapshotter = "{}"\n'


def read(folder: Path, text: str, **others: str) -> ContainerdConfig:
    for name, content in others.items():
        (folder / f"{name}.toml").write_text(content)
    path = folder / "config.toml"
    path.write_text(text)
    return load(path)


@pytest.mark.parametrize(
    ("text", "table"),
    [
        (f"[plugins.cri.containerd]\n{OURS}", "[plugins.cri]"),
        (f"version = 2\n{OLD}{OURS}", '[plugins."io.containerd.grpc.v1.cri".containerd]'),
        (f"version = 3\n{NEW}{OURS}", '[plugins."io.containerd.cri.v1.images"]'),
    ],
)
def test_each_version_calls_it_by_its_own_name(tmp_path: Path, text: str, table: str) -> None:
    config = read(tmp_path, text + PLUGIN)
    assert config.cri["snapshotter"] == "ember"
    assert config.cri["disable_snapshot_annotations"] is False
    assert config.proxies["ember"]["address"] == "/run/ember/ember.sock"
    assert config.cri_table == table
    assert config.ignored == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"version = 3\n{OLD}{OURS}", "is before version 3"),
        (f"version = 2\n{NEW}{OURS}", "is since version 3"),
    ],
)
def test_a_table_of_another_version_is_ignored_and_named(
    tmp_path: Path, text: str, why: str
) -> None:
    config = read(tmp_path, text)
    assert config.cri == {}
    assert why in config.ignored[0]
    assert str(tmp_path / "config.toml") in config.ignored[0]


def test_imports_are_read_relative_to_the_file_and_the_later_one_wins(tmp_path: Path) -> None:
    text = (
        f'version = 3\nimports = ["a*.toml", "{tmp_path}/b.toml"]\n{NEW}snapshotter = "overlayfs"\n'
    )
    config = read(
        tmp_path,
        text,
        a1=f"version = 3\n{PLUGIN}{UNIT.format('ember')}",
        a2=f"version = 3\n{UNIT.format('overlayfs')}",
        b=f'version = 3\nimports = ["config.toml", "b.toml"]\n{NEW}snapshotter = "ember"\n',
    )
    assert "ember" in config.proxies
    assert config.cri["snapshotter"] == "ember"
    assert config.unpacks_into == ["ember", "overlayfs"]


def test_an_import_of_version_2_takes_the_place_of_the_whole_table(tmp_path: Path) -> None:
    text = f'version = 2\nimports = ["a.toml"]\n{OLD}{OURS}'
    config = read(tmp_path, text, a=f'version = 2\n{OLD}snapshotter = "overlayfs"\n')
    assert config.cri == {"snapshotter": "overlayfs"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("version = [", "config.toml: "),
        ('imports = ["absent.toml"]', "absent.toml: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'version = "3"\nimports = "a"\nplugins = 1\nproxy_plugins = 2',
        'version = 3\n[plugins]\n"io.containerd.cri.v1.images" = 1\n'
        '"io.containerd.transfer.v1.local" = { unpack_config = [1] }',
        "",
    ],
)
def test_odd_values_are_passed_over(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)
    assert (config.proxies, config.cri) == ({}, {})
