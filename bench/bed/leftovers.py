"""Clear away what a bed left on the machine: processes, control groups, mounts, files.

A bed holds the lock file in its directory for as long as it lives; a directory whose lock is free
belongs to a bed that was killed. Nothing outside that directory and the bed's own name is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.bed.link import NAMESPACES

CGROUPS = Path("/sys/fs/cgroup")
RUNC_STATE = Path("/run/containerd/runc")
END_S = 10.0


def lock(directory: Path) -> int | None:
    """Take the bed's lock; the descriptor, or None when its owner lives."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sweep(base: Path) -> list[str]:
    """Clear all beds under ``base`` whose owner is gone; their names."""
    cleared = []
    for directory in sorted(base.iterdir()) if base.is_dir() else []:
        if not directory.is_dir():
            continue
        descriptor = lock(directory)
        if descriptor is None:
            continue
        try:
            clear(directory)
        finally:
            os.close(descriptor)
        cleared.append(directory.name)
    return cleared


def clear(directory: Path) -> None:
    """Remove all traces of the bed in ``directory``; its name is the directory's."""
    name = directory.name
    end_processes(directory, name)
    for group in cgroups(name):
        with contextlib.suppress(OSError):
            group.rmdir()
    unmount_below(directory)
    shutil.rmtree(RUNC_STATE / name, ignore_errors=True)
    if (NAMESPACES / name).exists():
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    remove_tree(directory)


def end_processes(directory: Path, name: str = "") -> None:
    """Kill what has ``directory`` in its command line, and what is in the control groups ``name``.

    OSError when they do not end.
    """
    deadline = time.monotonic() + END_S
    while victims := {
        *processes_naming(directory),
        *(processes_in_cgroups(name) if name else ()),
    }:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise OSError(f"{directory}: processes {sorted(victims)} do not end")
        time.sleep(0.05)


def remove_tree(directory: Path) -> None:
    """Remove ``directory`` even while a dying thread still takes things away below it."""
    deadline = time.monotonic() + END_S
    while directory.exists():
        if time.monotonic() > deadline:
            shutil.rmtree(directory)  # raises what is in the way
        shutil.rmtree(directory, ignore_errors=True)


def processes_naming(directory: Path) -> Iterator[int]:
    """Processes with the bed's directory in their command line, but for us and our parents."""
    ours = set(ancestors(os.getpid()))
    wanted = os.fsencode(directory)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        with contextlib.suppress(OSError):
            # The name in brackets may hold spaces; the parent is the second field after it.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            continue
        return


def cgroups(name: str) -> list[Path]:
    """The bed's control groups, deepest first: containerd names them after its namespace."""
    found: list[Path] = []
    for top in [CGROUPS / name, *CGROUPS.glob(f"*/{name}")]:
        if top.is_dir():
            found += [top, *(path for path in top.rglob("*") if path.is_dir())]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def processes_in_cgroups(name: str) -> Iterator[int]:
    for group in cgroups(name):
        with contextlib.suppress(OSError):
            yield from map(int, (group / "cgroup.procs").read_text().split())


def mounts_below(directory: Path) -> list[str]:
    """Mount points under ``directory``, the last mounted first."""
    prefix = f"{directory}/"
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4].encode().decode("unicode_escape")
        if point.startswith(prefix) or point == str(directory):
            points.append(point)
    return points[::-1]


def unmount_below(directory: Path) -> None:
    for point in mounts_below(directory):
        # Lazily: a process of somebody else may look at it just now.
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)
    left = mounts_below(directory)
    if left:
        raise OSError(f"{directory}: still mounted after umount: {', '.join(left)}")
