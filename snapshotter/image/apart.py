"""Manners of a process that works for the daemon for a while: it goes first, and never stays alone.

The daemon is the last that the kernel kills for want of memory, and whatever it starts begins so
too; a stranger's index must not have other people's programs killed in place of its own check.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from pathlib import Path

FIRST_TO_GO = 900
"""Of -1000 (never) to 1000: see proc(5), oom_score_adj."""
_PR_SET_PDEATHSIG = 1


def give_way() -> None:
    """Be the first to go when memory is short, and go when the daemon does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO), encoding="ascii")
