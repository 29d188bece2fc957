"""The probe of the lazy path: it tries, says why not, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ioengine import mounts
from ioengine.probe import SCRATCH_PREFIX
from ioengine.probe_image import probe_image
from ioengine.probe_lazy import FANOTIFY, probe_directio, probe_lazy

pytestmark = pytest.mark.root


@pytest.fixture
def disk() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="ember-probe-", dir="/var/tmp"))
    yield root
    root.rmdir()


def below(root: Path) -> list[str]:
    return [str(m.target) for m in mounts.mountinfo() if m.target.is_relative_to(root)]


def test_this_kernel_has_the_lazy_path_on_a_real_file_system(disk: Path) -> None:
    probe = probe_lazy(disk)
    assert probe.path == FANOTIFY and probe.reasons == []
    assert all(check.passed for check in probe.checks) and len(probe.checks) >= 5
    assert list(disk.iterdir()) == [] and below(disk) == []


def test_a_tmpfs_is_refused_with_the_reason_and_the_way_out() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        probe = probe_lazy(Path(name))
        assert list(Path(name).iterdir()) == []
    assert probe.path is None and not probe.directio
    assert len(probe.reasons) == 1
    assert "tmpfs" in probe.reasons[0] and "ext4" in probe.reasons[0]


def test_an_overlay_is_refused_with_the_reason(disk: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (disk / name).mkdir()
    options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
    merged = disk / "merged"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(merged)], check=True)
    try:
        probe = probe_lazy(merged)
    finally:
        mounts.unmount(merged, detach=True)
        subprocess.run(["rm", "-r", *map(str, disk.iterdir())], check=True)
    assert probe.path is None and "overlay" in probe.reasons[0]


def test_without_the_capability_it_says_so_and_tries_nothing(disk: Path) -> None:
    disk.chmod(0o777)
    text = (
        "import os, sys; from pathlib import Path; from ioengine.probe_lazy import probe_lazy\n"
        "os.setuid(65534); probe = probe_lazy(Path(sys.argv[1])); print(probe.path, probe.reasons)"
    )
    project = str(Path(__file__).resolve().parents[2])
    told = subprocess.run(
        [sys.executable, "-c", text, str(disk)],
        env={**os.environ, "PYTHONPATH": project},
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    assert told.startswith("None") and "CAP_SYS_ADMIN" in told


def test_what_a_killed_probe_left_is_cleared_away(disk: Path) -> None:
    scratch = disk / f"{SCRATCH_PREFIX}left"
    (scratch / "views").mkdir(parents=True)
    (scratch / "guarded").mkdir()
    mounts.bind_private(scratch / "views", scratch / "guarded")
    assert probe_lazy(disk).path == FANOTIFY
    assert list(disk.iterdir()) == [] and below(disk) == []


def test_what_is_no_directory_of_a_probe_is_in_nobodys_way(disk: Path) -> None:
    (disk / f"{SCRATCH_PREFIX}file").touch()
    (disk / f"{SCRATCH_PREFIX}link").symlink_to("/etc")
    (disk / f"{SCRATCH_PREFIX}half").mkdir()
    (disk / f"{SCRATCH_PREFIX}half" / "guarded").touch()
    assert probe_lazy(disk).path == FANOTIFY
    assert probe_directio(disk) == probe_lazy(disk).directio
    assert list(disk.iterdir()) == [] and below(disk) == []


def test_lengths_that_no_image_can_have_are_refused() -> None:
    assert len(probe_image(1)) == len(probe_image(1 << 40)) == 2048
    for length in (0, -1, 1 << 41):
        with pytest.raises(ValueError):
            probe_image(length)
