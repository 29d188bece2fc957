"""What a process takes while nothing is asked of it: memory of its own, and how often it wakes.

A thread that sleeps and is woken has given up its processor by itself: that is a voluntary switch,
counted by the kernel for each thread. Threads that have ended in between are not counted.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

Switches = dict[tuple[int, str], int]


def switches(pid: int) -> Switches:
    """By number and name of each thread, how often it has gone to sleep since it began."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found[int(task.name), (task / "comm").read_text().strip()] = _count(task)
    return found


def wakes(before: Switches, after: Switches) -> dict[tuple[int, str], int]:
    """How often each thread that still is there has slept in between; those that have."""
    slept = {thread: count - before.get(thread, 0) for thread, count in after.items()}
    return {thread: count for thread, count in slept.items() if count}


def own_bytes(pid: int) -> int:
    """Memory of a process, of what it shares with others its share (Pss in smaps_rollup)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no line Pss")


def _count(task: Path) -> int:
    for line in (task / "status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    raise ValueError(f"{task}/status has no line voluntary_ctxt_switches")
