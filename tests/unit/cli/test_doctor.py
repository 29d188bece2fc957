"""What the doctor says of each fault, that it goes by what runs, and that it leaves no trace."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.cli.checks import node
from snapshotter.cli.checks.node import SCRATCH_PREFIX, kernel
from snapshotter.cli.checks.peer import descriptors_of, listener, option_of
from snapshotter.config import Config, load
from snapshotter.indexes.keys import write_key_pair
from tests.fakes.containerd import FakeContainerd, fake_containerd
from tests.fakes.daemon import FakeOperations
from tests.unit.cli.conftest import Place

ANNOTATIONS = {"enable_remote_snapshot_annotations": "true"}
RAW = (
    "StatusCode",
    "UNKNOWN",
    "FAILED_PRECONDITION",
    "failed to connect",
    "last error",
    SCRATCH_PREFIX,
)
Row = dict[str, str]


def checked(place: Place) -> dict[str, Row]:
    """The rows by name; each name once, and a way out exactly where something is not well."""
    result = place.ember("doctor", "--json")
    rows: list[Row] = json.loads(result.stdout)
    assert result.stderr == ""
    assert result.exit_code == int(any(row["result"] == "fail" for row in rows))
    for row in rows:
        assert list(row) == ["what", "result", "found", "way_out"]
        assert bool(row["way_out"]) == (row["result"] != "ok"), row
        assert not [word for word in RAW if word in row["found"] + row["way_out"]], row
    names = [row["what"] for row in rows]
    assert len(names) == len(set(names))
    return {row["what"]: row for row in rows}


@pytest.fixture
def containerd(place: Place) -> Iterator[FakeContainerd]:
    exports = {"address": str(place.socket), **ANNOTATIONS}
    with fake_containerd(place.directory / "containerd.sock", exports) as made:
        yield made


def test_keys_that_cannot_be_used_are_told(place: Place) -> None:
    keys = place.directory / "keys"
    keys.mkdir(mode=0o755)
    config = f'[index]\ntrusted_keys = "{keys}"\nsign_key = "{place.directory}/key"\n'
    place.config.write_text(place.config.read_text() + config)
    rows = checked(place)
    assert rows["trusted keys"]["found"] == f"0 in {keys}"
    assert "there is no such file" in rows["signing key"]["found"]
    made = write_key_pair(place.directory / "key")
    (keys / "a.pub").write_text("no key")
    rows = checked(place)
    assert rows["trusted keys"]["result"] == "warn"
    assert rows["trusted keys"]["found"] == f"trusted key {keys}/a.pub is no public key in PEM"
    assert rows["signing key"]["found"] == f"{place.directory}/key, {made.key_id}"


def test_nothing_is_left_behind(place: Place) -> None:
    before = sorted(place.directory.rglob("*"))
    mounts = Path("/proc/self/mountinfo").read_text()
    rows = checked(place)
    assert sorted(place.directory.rglob("*")) == before
    assert str(place.directory) not in Path("/proc/self/mountinfo").read_text().replace(mounts, "")
    if os.geteuid() == 0:
        found = rows["cache directory"]["found"]
        assert found == f"{place.directory}/root does not exist yet; tried in {place.directory}"
    (place.directory / "root").mkdir()
    assert "cache directory" not in checked(place)
    assert list((place.directory / "root").iterdir()) == []


def test_a_node_without_anything_running_gets_a_way_out_for_each(place: Place) -> None:
    rows = checked(place)
    address = place.directory / "containerd.sock"
    assert rows["containerd"] == {
        "what": "containerd",
        "result": "fail",
        "found": f"{address}: nobody answers (No such file or directory)",
        "way_out": "start it, or set containerd.address",
    }
    assert rows["daemon"]["found"] == f"no daemon answers at {place.socket}"
    assert "ember serve" in rows["daemon"]["way_out"]


def test_lines_are_marked_and_only_bad_ones_have_an_arrow(place: Place) -> None:
    lines = place.ember("doctor").stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "fail"}
    assert all((" → " in line) == (not line.startswith("ok ")) for line in lines)


def test_a_daemon_and_a_containerd_that_are_joined_are_well(
    place: Place, served: FakeOperations, containerd: FakeContainerd
) -> None:
    rows = checked(place)
    for what in ("daemon", "containerd", "proxy plugin", "image labels", "CRI"):
        assert rows[what]["result"] == "ok", rows[what]
    assert rows["daemon"]["found"] == f"process {os.getpid()} at {place.socket}"
    assert rows["containerd"]["found"] == f"v2.4.2 at {place.directory}/containerd.sock"
    assert rows["CRI"]["found"] == "is not served by this containerd"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY:
        assert rows["descriptors"]["found"] == f"the daemon may open {limit}"


def test_a_daemon_that_does_not_answer_is_not_well(
    place: Place, served: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_ANSWER_S", 0.2)
    served.hangs = True
    row = next(check for check in node.daemon(load(place.config)) if check.what == "daemon")
    assert row.result == "fail"
    assert row.found.endswith(f"(process {os.getpid()}) is there but does not answer")
    assert f"kill -9 {os.getpid()}" in row.way_out


def test_a_plugin_that_is_not_loaded_is_broken_whatever_a_file_says(
    place: Place, containerd: FakeContainerd
) -> None:
    containerd.has_plugin(None)
    row = checked(place)["proxy plugin"]
    assert (row["result"], row["found"]) == ("fail", "containerd has no snapshotter 'ember'")
    assert "docs/install.md" in row["way_out"]


def test_a_plugin_that_points_elsewhere_is_broken(place: Place, containerd: FakeContainerd) -> None:
    containerd.has_plugin({"address": "/run/other.sock"})
    row = checked(place)["proxy plugin"]
    assert row["result"] == "fail"
    assert row["found"] == "[proxy_plugins.ember] points at '/run/other.sock'"
    assert repr(str(place.socket)) in row["way_out"]


def test_a_capability_that_breaks_images_is_broken(
    place: Place, containerd: FakeContainerd
) -> None:
    containerd.has_plugin({"address": str(place.socket)}, "remap-ids", "rebase")
    row = checked(place)["proxy plugin"]
    assert row["result"] == "fail"
    assert "capability rebase" in row["found"]


def test_a_kubelet_that_looks_elsewhere_is_told_of(
    place: Place, containerd: FakeContainerd
) -> None:
    root = place.directory / "root"
    root.mkdir()
    for told, way_out in (
        (place.directory / "other", "set root under the plugin's exports"),
        (place.directory / "io.containerd.snapshotter.v1.ember", f"ln -s {root} "),
    ):
        containerd.has_plugin({"address": str(place.socket), "root": str(told)})
        containerd.serves_cri(str(told))
        row = checked(place)["image place"]
        assert row["result"] == "warn"
        assert row["found"].startswith(f"the kubelet is told that images are in {told}")
        assert row["way_out"].startswith(way_out)
        told.symlink_to(root)
        assert checked(place)["image place"]["result"] == "ok"


@pytest.mark.parametrize(
    ("version", "exports", "disabled", "result"),
    [
        ("1.6.20~ds1", {}, True, "warn"),
        ("1.6.20~ds1", {}, False, "ok"),
        ("1.7.27", ANNOTATIONS, True, "warn"),
        ("v2.0.5", ANNOTATIONS, None, "warn"),
        ("v2.1.0", ANNOTATIONS, None, "ok"),
        ("v2.4.2", {}, None, "warn"),
    ],
)
def test_labels_come_where_this_containerd_sends_them(
    place: Place,
    containerd: FakeContainerd,
    version: str,
    exports: dict[str, str],
    disabled: bool | None,
    result: str,
) -> None:
    containerd.is_version(version)
    containerd.has_plugin({"address": str(place.socket), **exports})
    containerd.serves_cri(
        "/var/lib/containerd/io.containerd.snapshotter.v1.ember", disabled=disabled
    )
    rows = checked(place)
    assert rows["image labels"]["result"] == result
    assert rows["CRI"]["result"] == "ok"


def test_pods_that_do_not_use_ember_are_told_of(place: Place, containerd: FakeContainerd) -> None:
    containerd.serves_cri("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs")
    row = checked(place)["CRI"]
    assert (row["result"], row["found"]) == ("warn", "pods' images go elsewhere")
    assert row["way_out"].startswith('snapshotter = "ember" in ')


def test_the_one_who_listens_and_what_it_was_started_with_are_known(
    place: Place, served: FakeOperations
) -> None:
    assert listener(place.socket) == os.getpid()
    assert listener(place.directory / "absent") is None
    pause = "import sys; print(flush=True); sys.stdin.read()"
    python = Path(sys.executable).name
    for words, wanted in (
        (["-c", pause, "--config", "a.toml"], "a.toml"),
        (["-c", pause, "--config=/b.toml"], "/b.toml"),
        (["-c", pause], None),
    ):
        started = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=place.directory,
        )
        with started:
            assert started.stdout is not None
            assert started.stdout.read(1) == b"\n"
            found = option_of(started.pid, python, "--config")
            assert option_of(started.pid, "containerd", "--config") is None
            assert started.stdin is not None
            started.stdin.close()
        assert found == (place.directory / wanted if wanted else None)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert descriptors_of("self") == (None if hard == resource.RLIM_INFINITY else hard)


def test_a_cache_that_cannot_be_written_is_broken(place: Place) -> None:
    rows = list(kernel(Config(root=Path("/proc/none/root"))))
    if os.geteuid() == 0:
        assert rows[-1].result == "fail"
        assert rows[-1].found.startswith("/proc cannot be written: ")
    else:
        assert rows[0].way_out == "run it as root"
