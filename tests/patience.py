"""Waiting for something that another process does: for what is seen of it, never for a while.

The only place among the tests that sleeps; what is waited for is looked at every few milliseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.02
PATIENCE_S = 30.0


def until(holds: Callable[[], bool], limit_s: float = PATIENCE_S) -> bool:
    """Whether it came to hold within ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def waits_for_bytes(pid: int) -> bool:
    """Whether a thread of the process stands still in a read that the guard has to answer."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            if "fanotify" in (thread / "stack").read_text():
                return True
    return False


def someone_waits_beside(pid: int) -> bool:
    """Whether a process in the container of ``pid`` does: they have their numbers from one place.

    What ``ctr`` runs in a container is no child of whoever asked for it.
    """
    numbers = Path(f"/proc/{pid}/ns/pid").readlink()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/pid").readlink() == numbers and waits_for_bytes(int(process.name)):
                return True
    return False
