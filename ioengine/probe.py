"""What this kernel and this cache directory allow, found by trying, and the choice that follows.

Every finding says what was found, or what is missing and the way out: `ember doctor` and the log
print it as it is. Trying happens in unnamed files under the cache directory; nothing is left.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ioengine._native import ffi, lib
from ioengine.buffers import BufferPool
from ioengine.engine import IoEngine
from ioengine.threads import ThreadEngine
from ioengine.uring import UringEngine, try_ring

SCRATCH_PREFIX = ".probe-"
"""How what has to have a name while something is tried begins."""
_DIRECT_ALIGNMENTS_BYTES = (512, 4096)


class LazyFinding(Protocol):
    """What a probe of the lazy data path tells (probe_lazy.py)."""

    @property
    def path(self) -> str | None:
        """The data path that works here, None: none does."""
        ...

    @property
    def reasons(self) -> Sequence[str]:
        """Why not, one line for each thing that is missing."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried: whether it is allowed, what was found, and the way out if not."""

    allowed: bool
    reason: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.way_out}" if self.way_out else self.reason


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The findings for one cache directory. ``direct_alignment_bytes`` is 0 without O_DIRECT."""

    kernel: str
    io_uring: Finding
    direct: Finding
    direct_alignment_bytes: int
    lazy: LazyFinding | None


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that was opened, and why it and not another."""

    engine: IoEngine
    reason: str


def probe(
    root: Path,
    lazy: Callable[[Path], LazyFinding] | None = None,
    *,
    shown: Path | None = None,
) -> ProbeReport:
    """Try everything under ``root``, an existing directory; OSError if it can't be written.

    ``lazy`` probes the lazy data path; without it that slot of the report stays empty. Findings
    name ``shown`` where ``root`` is only a scratch directory in it.
    """
    direct, alignment_bytes = probe_direct(root, shown)
    return ProbeReport(
        kernel=platform.release(),
        io_uring=probe_io_uring(root, shown),
        direct=direct,
        direct_alignment_bytes=alignment_bytes,
        lazy=lazy(root) if lazy is not None else None,
    )


def probe_io_uring(root: Path, shown: Path | None = None) -> Finding:
    """Whether a ring is let through, and works on files under ``root``.

    The set-up is tried in a child first, since a seccomp filter may kill for it; then a page is
    written with a linked fdatasync and read back. Blocks for some milliseconds.
    """
    killed_by = ffi.new("int *")
    result = lib.ember_ring_allowed(killed_by)
    if result < 0:
        return explain_io_uring(-result, killed_by[0], _io_uring_disabled(), _under_seccomp())
    with _unnamed(root) as fd:
        try:
            try_ring(fd)
        except OSError as error:
            return Finding(False, f"io_uring does not work in {shown or root}: {error.strerror}")
    return Finding(True, f"io_uring works in {shown or root}")


def explain_io_uring(number: int, killed_by: int, disabled: int | None, seccomp: bool) -> Finding:
    """Put the errno of io_uring_setup into words.

    ``disabled``: the sysctl kernel.io_uring_disabled (Linux 6.6, admin-guide/sysctl/kernel.rst),
    None where it doesn't exist; ``seccomp``: whether this process runs under a filter.
    """
    if killed_by:
        return Finding(
            False,
            f"a seccomp filter kills io_uring_setup ({signal.Signals(killed_by).name})",
            "allow the io_uring system calls in the unit's SystemCallFilter",
        )
    if number == errno.ENOSYS:
        return Finding(
            False,
            f"Linux {platform.release()} has no io_uring, or a sandbox hides it",
            "use a kernel with CONFIG_IO_URING",
        )
    if number == errno.EPERM and disabled:
        who = "everybody" if disabled == 2 else "processes without CAP_SYS_ADMIN"
        return Finding(
            False,
            f"sysctl kernel.io_uring_disabled={disabled} denies io_uring to {who}",
            "set it to 0",
        )
    if number == errno.EPERM and seccomp:
        return Finding(
            False,
            "a seccomp filter denies io_uring_setup, as container runtimes' default profiles do",
            "allow the io_uring system calls in the container's seccomp profile",
        )
    if number in (errno.EACCES, errno.EPERM):
        return Finding(
            False,
            f"a security module denies io_uring ({os.strerror(number)})",
            "allow io_uring to this process in its policy",
        )
    if number == errno.ENOMEM:
        return Finding(
            False,
            "the limit of locked memory has no room for an io_uring",
            "raise RLIMIT_MEMLOCK (LimitMEMLOCK= in the unit)",
        )
    return Finding(False, f"io_uring_setup fails: {os.strerror(number)}")


def probe_direct(root: Path, shown: Path | None = None) -> tuple[Finding, int]:
    """Whether files under ``root`` can be written and read past the page cache, and how aligned.

    Returns the finding and the smallest alignment in bytes that works, 0 if none does.
    """
    with _unnamed(root) as unnamed:
        try:
            fd = os.open(f"/proc/self/fd/{unnamed}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return _no_direct(shown or root, error.errno or errno.EINVAL), 0
        number = 0
        try:
            for alignment_bytes in _DIRECT_ALIGNMENTS_BYTES:
                number = _try_direct(fd, alignment_bytes)
                if number == 0:
                    reason = (
                        f"O_DIRECT works in {shown or root}, aligned to {alignment_bytes} bytes"
                    )
                    return Finding(True, reason), alignment_bytes
        finally:
            os.close(fd)
    return _no_direct(shown or root, number), 0


def choose_engine(
    root: Path,
    *,
    prefer: Literal["auto", "uring", "threads"] = "auto",
    buffer_count: int = 16,
    depth: int = 64,
    workers: int = 8,
) -> EngineChoice:
    """Open the best engine that the kernel allows, in the running event loop.

    ``prefer="uring"`` insists on it: OSError says why there is none.
    """
    pool = BufferPool(buffer_count)
    if prefer == "threads":
        engine = ThreadEngine.open(pool, workers=workers, depth=depth)
        return EngineChoice(engine, "threads: asked for by the configuration")
    try:
        finding = probe_io_uring(root)
    except OSError as error:  # threads need nothing that would have to be tried first
        finding = Finding(False, f"io_uring can't be tried in {root}: {error.strerror}")
    if finding.allowed:
        try:
            ring = UringEngine.open(pool, depth=depth)
        except OSError as error:
            finding = Finding(False, str(error))
        else:
            pinned = "registered" if ring.registered else "unregistered (RLIMIT_MEMLOCK)"
            return EngineChoice(ring, f"uring: {finding}; {buffer_count} buffers, {pinned}")
    if prefer == "uring":
        raise OSError(errno.EPERM, f"io_uring was asked for, but {finding}")
    engine = ThreadEngine.open(pool, workers=workers, depth=depth)
    return EngineChoice(engine, f"threads: {finding}")


def _io_uring_disabled() -> int | None:
    try:
        text = Path("/proc/sys/kernel/io_uring_disabled").read_text(encoding="ascii")
        return int(text)
    except (OSError, ValueError):
        return None


def _under_seccomp() -> bool:
    """Field Seccomp of proc_pid_status(5): 2 means that a filter is installed."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("Seccomp:"):
                return line.split()[1] == "2"
    return False


@contextlib.contextmanager
def _unnamed(root: Path) -> Iterator[int]:
    """The descriptor of a file that goes with its last descriptor: a kill leaves nothing."""
    try:
        fd = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        fd, path = tempfile.mkstemp(prefix=SCRATCH_PREFIX, dir=root)
        Path(path).unlink()
    try:
        yield fd
    finally:
        os.close(fd)


def _try_direct(fd: int, alignment_bytes: int) -> int:
    """Write and read one unit at its own alignment; 0 or the errno."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        pattern = os.urandom(alignment_bytes)
        memory[:alignment_bytes] = pattern
        view = memoryview(memory)[:alignment_bytes]
        try:
            os.pwritev(fd, [view], alignment_bytes)
            memory[:alignment_bytes] = bytes(alignment_bytes)
            count = os.preadv(fd, [view], alignment_bytes)
        except OSError as error:
            return error.errno or errno.EIO
        finally:
            view.release()
        return 0 if memory[:count] == pattern else errno.EIO


def _no_direct(root: Path, number: int) -> Finding:
    return Finding(
        False,
        f"O_DIRECT fails in {root} ({os.strerror(number)})",
        "put the cache directory on ext4, xfs or btrfs",
    )
