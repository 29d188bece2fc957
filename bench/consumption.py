"""What a daemon costs: processor seconds and peak memory of a process and those it started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
RESET_PEAK = "5"


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything; [] when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for one in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == one]
    return found


def processor_s(pids: Iterable[int]) -> float:
    """User and system time of living processes, with that of children that ended."""
    total = 0
    for pid in pids:
        if fields := stat_fields(pid):
            total += sum(int(field) for field in fields[11:15])
    return total / TICKS


def reset_peak(pids: Iterable[int]) -> None:
    """Let the peak of each process begin anew from what it holds now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def peak_bytes(pids: Iterable[int]) -> int:
    """The sum of the peaks of resident memory; each may have had its own at another moment."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total
