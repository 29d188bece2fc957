"""Who listens on a socket: the kernel knows the process, and /proc what it was started with."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from pathlib import Path

_CONNECT_S = 2.0


def listener(path: Path) -> int | None:
    """The process that listens at ``path`` (SO_PEERCRED, unix(7)); None if it cannot be told.

    0 would be a process outside this pid namespace.
    """
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
    ):
        probe.settimeout(_CONNECT_S)
        probe.connect(str(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return struct.unpack("3i", credentials)[0] or None
    return None


def option_of(pid: int, program: str, *names: str) -> Path | None:
    """The path that ``program`` was given as one of the options ``names``; None without one."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        directory = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None
    if not Path(words[0]).name.startswith(program):
        return None
    for word, following in itertools.pairwise(words):
        name, equals, value = word.partition("=")
        if name in names:
            return directory / (value if equals else following)
    return None


def descriptors_of(pid: int | str) -> int | None:
    """How many descriptors a process may have open (``self``: this one); None: no limit."""
    text = Path(f"/proc/{pid}/limits").read_text(encoding="ascii", errors="replace")
    for line in text.splitlines():
        if line.startswith("Max open files"):
            hard = line.split()[4]
            return int(hard) if hard.isdigit() else None
    return None
